"""Rekindle's bundled model, a Hugging Face model directory, and what it was trained on. Needs no other package."""

from pathlib import Path

MODEL_DIR = Path(__file__).absolute().parent / "model"
