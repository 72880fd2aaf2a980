"""`python -m benchmarks front`: histories that a client sends back as text, through a front and without one.

    python -m benchmarks front --histories 200

For each tokenizer a server computes, and a front sends it token ids over HTTP. In the first turn of each history an
agent gets a reply of random printable tokens that encodes to others; in the second its text is sent back. `stored` are
the tokens of prompt and first reply, `common` those before the first that a fresh encoding changes, `front` those that
the server reports as reused in the second turn, `alone` those that it reuses for the same history encoded afresh, sent
to it directly. The command fails if a front's prompt is not, byte for byte, the text of the fresh one, or if it reuses
less than what is stored without one block.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.coding_day.server import serving
from benchmarks.front.models import KINDS, write_model
from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.errors import ConfigError
from rekindle_lab.bench.workload import WORDS
from rekindle_lab.record import Measurement, Origin, deliver

AT_ONCE = 16
MOST_ATTEMPTS = 100  # until a reply encodes to other tokens
BANNED = -100.0
PRINTABLE = frozenset(map(chr, range(0x20, 0x7F))) - set("<>")


@dataclass(frozen=True, slots=True)
class FrontBench:
    """How many histories on each tokenizer, and the tokens of their first replies."""

    histories: int = 200
    tokens: int = 96
    kinds: tuple[str, ...] = KINDS
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        unknown = set(self.kinds) - set(KINDS)
        if unknown:
            raise ConfigError(f"tokenizer: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
        if min(self.histories, self.tokens) < 1:
            raise ConfigError("give at least one history, and one token")


@dataclass(frozen=True, slots=True)
class Turn:
    """A first turn and the history that its client sends back, as ids that are stored and as a fresh encoding.

    `common` leading ids are the same in both.
    """

    agent: str
    messages: Sequence[dict[str, str]]
    stored: Sequence[int]
    fresh: Sequence[int]
    common: int


@dataclass(frozen=True, slots=True)
class History:
    """What one history gave: tokens stored, common to the stored ids and a fresh encoding, reused with and without."""

    stored: int
    common: int
    front: int
    alone: int
    is_same_text: bool

    def holds(self, block_tokens: int) -> bool:
        """Whether the front kept the text, and all but a block of what is stored was reused."""
        return self.is_same_text and self.front >= self.stored - block_tokens


class Histories:
    """The histories of one tokenizer, over two servers that run."""

    def __init__(self, bench: FrontBench, front: Engine, front_port: int, backend_port: int) -> None:
        self._bench = bench
        self._encoder = front.encoder
        self._front = f"http://127.0.0.1:{front_port}/v1/chat/completions"
        self._backend = f"http://127.0.0.1:{backend_port}/v1/completions"
        vocabulary = front.encoder.vocabulary
        shown = (vocabulary.shown(token).decode("utf-8", "replace") for token in range(vocabulary.size))
        controls = {token for token in range(vocabulary.size) if vocabulary.is_control_token(token)}
        self._banned = {
            str(token): BANNED
            for token, text in enumerate(shown)
            if token in controls or not text.strip() or not set(text) <= PRINTABLE
        }

    def run(self) -> list[History]:
        """Return what every history gave, `AT_ONCE` at a time."""
        with httpx.Client(timeout=120, trust_env=False) as client, ThreadPoolExecutor(AT_ONCE) as workers:
            return list(workers.map(lambda number: self._history(client, number), range(self._bench.histories)))

    def _history(self, client: httpx.Client, number: int) -> History:
        """Talk until a reply encodes to other tokens than were sampled, then send it back."""
        attempts = (self._turn(client, f"{number}-{attempt}", (number, attempt)) for attempt in range(MOST_ATTEMPTS))
        turn = next(turn for turn in attempts if turn.common < len(turn.stored))
        second = self._chat(client, turn.agent, turn.messages, max_tokens=1)["rekindle"]
        # Of a prompt that others have computed more may be reused; only what is stored counts.
        alone = min(self._reused(client, turn.fresh), len(turn.stored))
        return History(
            stored=len(turn.stored),
            common=turn.common,
            front=min(second["reused_tokens"], len(turn.stored)),
            alone=alone,
            is_same_text=self._key(second["prompt_ids"]) == self._key(turn.fresh),
        )

    def _turn(self, client: httpx.Client, agent: str, seed: tuple[int, int]) -> Turn:
        chooser = np.random.default_rng((self._bench.seed, *seed))
        words = [str(word) for word in chooser.choice(WORDS, 48)]
        messages = [
            {"role": "system", "content": f"You are {words[0]}, who is {words[1]}."},
            {"role": "user", "content": " ".join(words)},
        ]
        first = self._chat(client, agent, messages, max_tokens=self._bench.tokens, seed=int(chooser.integers(1 << 31)))
        text = first["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": " ".join(words[::-1])}]
        stored = [*first["rekindle"]["prompt_ids"], *first["rekindle"]["completion_ids"]]
        fresh = self._fresh(client, messages)
        return Turn(agent, messages, stored, fresh, _common(stored, fresh))

    def _chat(
        self, client: httpx.Client, agent: str, messages: Sequence[dict[str, str]], **options: Any
    ) -> dict[str, Any]:
        """Return the front's answer, of printable tokens alone."""
        body = {"messages": messages, "temperature": 1, "ignore_eos": True, "logit_bias": self._banned, **options}
        answer = client.post(self._front, json=body | {"rekindle": {"return_ids": True}}, headers={"X-Agent-ID": agent})
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def _fresh(self, client: httpx.Client, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return a history as an encoder that knows of no stored tokens encodes it."""
        url = self._backend.removesuffix("/completions") + "/tokenize"
        ids: list[int] = client.post(url, json={"messages": messages}).raise_for_status().json()["ids"]
        return ids

    def _reused(self, client: httpx.Client, ids: Sequence[int]) -> int:
        """Return how much of a prompt the server that computes reuses by itself."""
        answer = client.post(self._backend, json={"prompt": ids, "max_tokens": 1}).raise_for_status()
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def _key(self, ids: Sequence[int]) -> bytes:
        return self._encoder.key_of(np.asarray(ids, dtype=np.uint32))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading ids are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def measure(bench: FrontBench, kind: str) -> tuple[list[History], int]:
    """Run the histories of one tokenizer; return what they gave, and the tokens of a block of what computes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rekindle-front-")))
        model = str(write_model(folder / "model", kind, bench.seed))
        computes = Settings.load({"model": model, "store": "off", "hot_bytes": "64MiB", "threads": 1})
        backend, backend_port = stack.enter_context(serving(computes, datetime.now))
        address = f"openai=http://127.0.0.1:{backend_port}"
        texts = Settings.load({"model": model, "store": str(folder / "texts"), "backend": address})
        front, front_port = stack.enter_context(serving(texts, datetime.now))
        found = Histories(bench, front, front_port, backend_port).run()
        front.check()
        return found, backend.spec.layout.block_tokens


def run_front(bench: FrontBench, console: Console) -> int:
    """Measure every tokenizer, show and deliver the figures; return 1 if one history fell short, else 0."""
    table = Table(title="Histories sent back as text", title_justify="left")
    for name in ("tokenizer", "histories", "same text", "stored", "common", "front", "alone", "fell short"):
        table.add_column(name, justify="left" if name == "tokenizer" else "right")
    measured: list[Measurement] = []
    num_short = 0
    for kind in bench.kinds:
        with console.status(kind):
            found, block_tokens = measure(bench, kind)
        short = sum(not each.holds(block_tokens) for each in found)
        num_same = sum(each.is_same_text for each in found)
        totals = [sum(getattr(each, name) for each in found) for name in ("stored", "common", "front", "alone")]
        table.add_row(kind, *(f"{count:,}" for count in (len(found), num_same, *totals, short)))
        measured += _measurements(kind, found, same=num_same, short=short)
        num_short += short
    console.print(table)
    deliver(measured, Origin.here("front", {**asdict(bench), "out": None}), bench.out, console)
    return 1 if num_short else 0


def _measurements(kind: str, found: Sequence[History], **detail: int) -> Iterator[Measurement]:
    for arm in ("front", "alone"):
        shares = tuple(min(1.0, getattr(each, arm) / each.stored) for each in found)
        yield Measurement(f"reused of what is stored: {kind}", arm, "share", shares, detail)
