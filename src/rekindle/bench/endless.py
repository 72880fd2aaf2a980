"""A copy of a model without an end token, so that a benchmark's replies have the requested length.

Its directory has links to the model's files and its own config; weights, tokenizer and KV are the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = "config.json"
LEFT_OUT = frozenset((CONFIG, "generation_config.json"))


def endless_copy(directory: Path, target: Path) -> Path:
    """Create `target`, which must not exist, as a copy of the model directory without an end token; return it."""
    target.mkdir()
    for path in directory.iterdir():
        if path.is_file() and path.name not in LEFT_OUT:
            (target / path.name).symlink_to(path.resolve())
    config = _without_end(json.loads((directory / CONFIG).read_text("utf-8")))
    (target / CONFIG).write_text(json.dumps(config, indent=1), "utf-8")
    return target


def _without_end(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config without an end token, including its nested parts."""
    parts = {name: _without_end(value) for name, value in config.items() if isinstance(value, dict)}
    return {**config, **parts, "eos_token_id": None}
