"""Bytes written to the disk for one-shot prompts and conversations: `python -m benchmarks wear MODEL`.

    python -m benchmarks wear smollm2 --prompts 100 --conversations 5 --turns 4

An arm each: unnamed requests written when they are reused, the default; all of them, as before; and the same requests
as agents. In each arm the same prompts with one system text are asked once, and then conversations of several turns,
on a store of its own. Bytes are those of records and of the index, and those of the index alone.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rekindle import Engine
from rekindle.config import Settings, show_bytes
from rekindle.errors import ConfigError
from rekindle_lab.bench.workload import WORDS
from rekindle_lab.record import Measurement, Origin, deliver

ARMS = ("reused", "always", "agents")
PARTS = ("one-shot prompts", "conversations")
MEASURES = tuple(f"{part}{what}" for part in PARTS for what in ("", ", index"))


@dataclass(frozen=True, slots=True)
class WearBench:
    """How many one-shot prompts and conversations, and the words of a prompt and of the system text."""

    prompts: int = 100
    conversations: int = 5
    turns: int = 4
    words: int = 150
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if min(self.prompts, self.conversations, self.turns, self.words) < 1:
            raise ConfigError("give at least one prompt, one conversation, one turn and one word")


def run_wear(settings: Settings, options: WearBench, console: Console) -> int:
    """Run every arm, print the table and JSON lines; return 0."""
    measured = [each for arm in ARMS for each in _arm(settings, options, arm)]
    console.print(_table(measured, options))
    deliver(measured, Origin.here("wear", {**asdict(options), "out": None}), options.out, console)
    return 0


def _arm(settings: Settings, options: WearBench, arm: str) -> list[Measurement]:
    words = Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="rekindle-wear-") as folder:
        store = replace(settings.store, dir=Path(folder), save_unnamed="reused" if arm == "reused" else "always")
        with Engine(replace(settings, store=store)) as engine:
            system = {"role": "system", "content": _text(words, options.words)}
            for number in range(options.prompts):
                _ask(engine, arm, f"prompt {number}", [system, _user(words, options)])
            once = _written(engine)
            for number in range(options.conversations):
                history = [system]
                for _ in range(options.turns):
                    history.append(_user(words, options))
                    reply = _ask(engine, arm, f"conversation {number}", history)
                    history.append({"role": "assistant", "content": reply})
            talks = _written(engine) - once
    per = np.repeat((options.prompts, options.conversations * options.turns), 2)
    found = zip(MEASURES, (*once, *talks) / per, strict=True)
    return [Measurement(name, arm, "bytes a request", (float(count),)) for name, count in found]


def _ask(engine: Engine, arm: str, name: str, messages: list[dict[str, Any]]) -> str:
    return engine.chat(name if arm == "agents" else None, messages, temperature=0.0, max_tokens=16).text


def _user(words: Random, options: WearBench) -> dict[str, Any]:
    return {"role": "user", "content": _text(words, options.words)}


def _text(words: Random, count: int) -> str:
    return " ".join(words.choices(WORDS, k=count)) + "."


def _written(engine: Engine) -> np.ndarray:
    """Return the bytes of records and index, and of the index [2], once nothing waits to be written."""
    engine.flush()
    stats = engine.stats().store
    assert stats is not None, "there is a store"
    index = stats["index_bytes_written"]
    return np.array([stats["bytes_written"] + index, index])


def _table(measured: list[Measurement], options: WearBench) -> Table:
    title = f"Written for a request: {options.prompts} prompts asked once, {options.conversations} conversations"
    shown = Table(title=title, title_justify="left")
    for name in ("arm", *MEASURES):
        shown.add_column(name, justify="left" if name == "arm" else "right")
    for arm in ARMS:
        shown.add_row(arm, *(show_bytes(each.median) for each in measured if each.arm == arm))
    return shown
