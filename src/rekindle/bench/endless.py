"""The same model without an end of answer: a benchmark's replies must be as long as it asks for.

Its directory has links to the model's files and a config of its own; weights, tokenizer and KV are the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = "config.json"
LEFT_OUT = frozenset((CONFIG, "generation_config.json"))


def endless_copy(directory: Path, target: Path) -> Path:
    """Make `target`, which must not exist yet, a twin of the model directory that knows no end; return it."""
    target.mkdir()
    for path in directory.iterdir():
        if path.is_file() and path.name not in LEFT_OUT:
            (target / path.name).symlink_to(path.resolve())
    config = _without_end(json.loads((directory / CONFIG).read_text("utf-8")))
    (target / CONFIG).write_text(json.dumps(config, indent=1), "utf-8")
    return target


def _without_end(config: dict[str, Any]) -> dict[str, Any]:
    """The config with no end token, its parts too."""
    parts = {name: _without_end(value) for name, value in config.items() if isinstance(value, dict)}
    return {**config, **parts, "eos_token_id": None}
