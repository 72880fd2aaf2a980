"""The model that is served: a Qwen3 of two layers with random weights and 64k of context, a template like Qwen3's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.coding_day.templates import behaviour

SHAPE = "qwen3-tiny-64k"
BEHAVIOUR = "strip-thinking"  # tools after the system text; reasoning dropped from history
MAKE = Path(__file__).parents[1] / "make_model.py"


def write_model(directory: Path) -> Path:
    """Write the model unless it is there; takes half a minute."""
    template = directory / "chat_template.jinja"
    wanted = behaviour(BEHAVIOUR).template
    if not template.exists() or template.read_text("utf-8") != wanted:
        subprocess.run([sys.executable, str(MAKE), SHAPE, str(directory)], check=True)
        template.write_text(wanted, "utf-8")
    return directory
