"""Turns of agents over a plain chat template, and what a purge must leave of them: nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rekindle.engine.api import Engine
from rekindle.engine.types import Report
from tests.engine.test_purge import disk_pieces, hot_pieces

SYSTEM = "You are a careful assistant. Answer in one short sentence, and remember what you are told. " * 3
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROLES = ("user", "assistant")


def with_template(directory: Path) -> Path:
    """Give a model directory this template."""
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def turn(*texts: str, system: str = SYSTEM) -> list[dict[str, Any]]:
    """A conversation: a system text, and what user and assistant say in turn."""
    spoken = ({"role": ROLES[at % 2], "content": text} for at, text in enumerate(texts))
    return [{"role": "system", "content": system}, *spoken]


def asked(engine: Engine, agent: str, *texts: str, system: str = SYSTEM, namespace: str = "default") -> Report:
    """What is reported of a turn with a short reply."""
    messages = turn(*texts, system=system)
    return engine.chat(agent, messages, namespace=namespace, temperature=0.0, max_tokens=4).report


def purged(engine: Engine, directory: Path, *, least: int) -> Report:
    """Purge an agent that has left at least this many pieces, and see that none is left; another's next turn."""

    def bob() -> Report:
        return asked(engine, "bob", "Where is the red box?", system="You are another assistant. " * 6)

    bob()
    engine.flush()
    before = hot_pieces(engine) | disk_pieces(directory)
    for text in ("Hello " * 20, "Hello again " * 20):
        asked(engine, "ada", text)
    engine.flush()
    of_ada = (hot_pieces(engine) | disk_pieces(directory)) - before
    assert len(of_ada) > least
    engine.agent("ada").purge()
    assert not of_ada & (hot_pieces(engine) | disk_pieces(directory))
    return bob()
