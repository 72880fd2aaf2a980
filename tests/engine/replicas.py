"""Replicas of one service: engines on stores of their own that share a secret and an object tier."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rekindle import Engine
from rekindle.engine.types import ChatResult, GenerationRequest
from rekindle.model.params import SamplingParams
from rekindle.text.messages import normalise_messages
from tests.proofs import proved

SECRET = b"s" * 32
WORDS = "Nobody saw anything odd in the garden on day {}. "


class Replicas:
    """Starts engines by name; an engine of the same name goes on with the store of the one before."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model = model
        self.directory = directory
        self.tier = directory / "tier"
        self._engines: dict[str, Engine] = {}

    def start(self, name: str, **settings: Any) -> Engine:
        store = self.directory / name
        store.mkdir(exist_ok=True)
        (store / "secret").write_bytes(SECRET)
        given = {"threads": 1, "hot_bytes": 4 << 20, "block_tokens": 16, "anticipate": "off", "store": store}
        shared = {"tier": str(self.tier), "tier_wait_s": 30.0}
        engine = proved(Engine(model=str(self.model), **{**given, **shared, **settings}))
        self._engines[name] = engine
        return engine

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def objects(self, folder: str) -> list[Path]:
        """Return the objects of one folder of the tier, by name; none that are still being written: NAME#1."""
        return sorted(path for path in self.tier.glob(f"*/{folder}/*") if path.is_file() and "#" not in path.name)


def history(number: int = 0, *, turns: Sequence[str] = (), days: int = 12) -> list[dict[str, str]]:
    """Return the messages of a conversation that differs by number from its beginning on; replies among `turns`."""
    words = f"talk {number}. " + "".join(WORDS.format(day) for day in range(days))
    said = [{"role": "user", "content": words}]
    for at, text in enumerate(turns):
        said.append({"role": "user" if at % 2 else "assistant", "content": text})
    return said


def ask(engine: Engine, messages: list[dict[str, str]], agent: str | None = "ada", **options: Any) -> ChatResult:
    params = SamplingParams(temperature=0.0, max_tokens=options.pop("max_tokens", 8))
    request = GenerationRequest(messages=normalise_messages(messages), agent=agent, params=params, **options)
    return engine.submit(request).result()


def exported(engine: Engine) -> None:
    """Wait until everything that ended is in the tier."""
    assert engine.flush()
    tier = engine.components.tier
    assert tier is not None and tier.exports.flush(120.0)


def figures(engine: Engine) -> dict[str, Any]:
    tier = engine.stats().tier
    assert tier is not None
    return dict(tier)


AT_WORK = """
import sys
from pathlib import Path
from tests.engine.replicas import Replicas, ask, exported, history
engine = Replicas(Path(sys.argv[1]), Path(sys.argv[2])).start("one", tier=sys.argv[3])
first = ask(engine, history())
exported(engine)
print(first.text, flush=True)
ask(engine, history(9), "eve", max_tokens=400)
"""


def after_a_kill(replicas: Replicas, tier: str) -> tuple[ChatResult, ChatResult]:
    """Return an agent's second reply twice: of one engine with nothing but itself, and of a replica with this tier, to
    which the process that gave the first reply has exported before it was killed at work."""
    undisturbed = replicas.start("undisturbed", tier=None)
    first = ask(undisturbed, history())
    told = history(turns=[first.text, "talk on"])
    command = [sys.executable, "-c", AT_WORK, str(replicas.model), str(replicas.directory), tier]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline().strip() == first.text.strip()
        os.kill(process.pid, signal.SIGKILL)
    other = replicas.start("other", tier=tier)
    went_on = ask(other, told)
    assert figures(other)["imported_objects"] > 0
    return ask(undisturbed, told), went_on


def running(model: Path, directory: Path) -> Iterator[Replicas]:
    replicas = Replicas(model, directory)
    try:
        yield replicas
    finally:
        replicas.close()
