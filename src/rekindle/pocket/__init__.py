"""The bundled model and the generator of the conversations it was trained on.

Owns its name and its place: package data, a Hugging Face model directory. Knows no torch; `conversations` is plain
Python.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).absolute().parent / "model"
NAME = "pocket"
ABOUT = (
    "pocket, the bundled model: 7 million parameters, 4,096 tokens of context. It repeats facts its conversation told "
    "it (places, codes, owners) over short distances; it knows nothing else, cannot reason and often mixes facts up."
)


def is_pocket(directory: Path | None) -> bool:
    """Whether a model loaded from `directory` is the bundled one, whatever it was called."""
    return directory is not None and directory.resolve() == MODEL_DIR.resolve()
