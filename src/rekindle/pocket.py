"""The bundled model: its name, and how it is found.

Its files, and the generator of the conversations it was trained on, are a distribution of their own, `rekindle-pocket`,
which `serve` brings along.
"""

from __future__ import annotations

from pathlib import Path

from rekindle.errors import ConfigError

NAME = "pocket"
MISSING = "the bundled model is not installed: pip install rekindle-pocket"
ABOUT = (
    "pocket, the bundled model: 7 million parameters, 4,096 tokens of context. It repeats facts from its "
    "conversation (places, codes, owners) over short distances; it knows nothing else, cannot reason and often mixes "
    "facts up. For real sentences: rekindle serve smollm2 (135 million parameters)."
)


def model_dir() -> Path:
    """Its directory; ConfigError that says what to install where it is missing."""
    try:
        from rekindle_pocket import MODEL_DIR
    except ModuleNotFoundError:
        raise ConfigError(f"{MISSING}, or name another model") from None
    return MODEL_DIR


def is_pocket(directory: Path | None) -> bool:
    """Whether a model loaded from `directory` is the bundled one, whatever it was called."""
    try:
        return directory is not None and directory.resolve() == model_dir().resolve()
    except ConfigError:
        return False
