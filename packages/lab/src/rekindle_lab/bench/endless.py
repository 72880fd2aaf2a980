"""A copy of a model without an end token, so that a benchmark's replies have the requested length.

Its directory has links to the model's files and its own config; weights, tokenizer and KV are the same. It has no chat
template: what that writes after a reply would end one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
LEFT_OUT = frozenset((CONFIG, TOKENIZER_CONFIG, "generation_config.json", "chat_template.jinja"))
NAMES_AN_END = frozenset(("eos_token", "chat_template"))  # keys of tokenizer_config.json


def endless_copy(directory: Path, target: Path) -> Path:
    """Create `target`, which must not exist, as a copy of the model directory without an end token; return it."""
    target.mkdir()
    for path in directory.iterdir():
        if path.is_file() and path.name not in LEFT_OUT:
            (target / path.name).symlink_to(path.resolve())
    config = _without_end(json.loads((directory / CONFIG).read_text("utf-8")))
    (target / CONFIG).write_text(json.dumps(config, indent=1), "utf-8")
    if (directory / TOKENIZER_CONFIG).is_file():
        described = json.loads((directory / TOKENIZER_CONFIG).read_text("utf-8"))
        kept = {name: value for name, value in described.items() if name not in NAMES_AN_END}
        (target / TOKENIZER_CONFIG).write_text(json.dumps(kept, indent=1), "utf-8")
    return target


def _without_end(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config without an end token, and those nested in it (`text_config`)."""
    nested = {name: each for name, each in config.items() if name.endswith("_config") and isinstance(each, dict)}
    return {**config, **{name: _without_end(each) for name, each in nested.items()}, "eos_token_id": None}
