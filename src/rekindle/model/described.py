"""A model by its small files alone: what has to be known to write prompts for it, without weights and their kernels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import ModelRefused

TEXT_PARTS = ("text_config", "llm_config")
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """What config.json and generation_config.json say; `max_context` None: nothing."""

    architecture: str
    family: str
    vocab_size: int
    max_context: int | None
    eos_ids: frozenset[int]

    @classmethod
    def read(cls, directory: Path) -> DescribedModel:
        """Read the files of a model's directory; ModelRefused if config.json is missing or no model's."""
        config = _object(directory / "config.json")
        text = next((part for name in TEXT_PARTS if (part := config.get(name))), config)
        try:
            size = int(text["vocab_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelRefused(f"{directory / 'config.json'} names no vocab_size: is it a language model?") from error
        longest = text.get("max_position_embeddings")
        return cls(
            architecture=str((config.get("architectures") or ["unknown"])[0]),
            family=str(config.get("model_type", "unknown")),
            vocab_size=size,
            max_context=longest if isinstance(longest, int) and longest > 0 else None,
            eos_ids=end_ids(directory),
        )


def end_ids(directory: Path) -> frozenset[int]:
    """The ids that end a reply: all that generation_config.json and config.json name, each of which may know fewer."""
    config = _object(directory / "config.json")
    parts = [config, *(part for name in TEXT_PARTS if isinstance(part := config.get(name), dict))]
    named = [part.get("eos_token_id") for part in (*parts, generation_config(directory))]
    ids = [each for value in named for each in (value if isinstance(value, list) else [value])]
    return frozenset(each for each in ids if isinstance(each, int) and each >= 0)


def generation_config(directory: Path) -> dict[str, Any]:
    """What generation_config.json says, nothing if it is missing; ModelRefused if it cannot be read."""
    path = directory / GENERATION_CONFIG
    return _object(path) if path.is_file() else {}


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelRefused(f"{path} holds no object: it is not a config of transformers")
    return found
