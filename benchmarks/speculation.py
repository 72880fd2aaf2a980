"""Decode with drafts from stored text, and without: tokens per second, on texts that repeat and texts that do not.

    python -m benchmarks speculation --tokens 128 --repeats 3
    python -m benchmarks speculation --model DIR --tokens 48

Both engines get the same requests in turn, and their replies must be equal. Prompts are computed before they are
measured, so that a request's wall time is decoding. Four kinds of replies:

    tool calls   greedy, after a prompt of similar calls in JSON, with the request to repeat them
    passage      greedy, after a passage, with the request to repeat it
    sent again   greedy, to a prompt that the agent has answered before: its memory holds the reply
    sampled      at a high temperature, which repeats little

End tokens are ordinary ones here, so replies have the requested length. Greedy replies of small and of random models
fall into loops, which drafts continue; a random model never repeats itself when it is sampled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.errors import ConfigError, RekindleError
from rekindle.harness.client import flags_of
from rekindle.model.params import SamplingParams
from rekindle.text.messages import Message
from rekindle_lab.record import Measurement, Origin, deliver

ARMS = ("off", "auto")
KINDS = ("tool calls", "passage", "sent again", "sampled")
TEMPERATURE = 1.5
PASSAGE = (
    "The lamp keeper walked down to the harbour and wrote a letter about winter rain. Seven boats had come home late "
    "with salt on every rope, while children counted stones along an old wall near the river."
)
CALL = {"name": "read_file", "arguments": {"path": "src/server/index.ts", "offset": 0, "limit": 200}}


@dataclass(frozen=True, slots=True)
class SpeculationBench:
    """Tokens of each reply, streams at once, and how often each kind is measured."""

    tokens: int = 128
    streams: tuple[int, ...] = (1, 4)
    repeats: int = 3
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if min(self.tokens - 1, self.repeats, *self.streams) < 1:
            raise ConfigError("give at least two tokens, one stream and one repeat")


@dataclass(frozen=True, slots=True)
class _Run:
    """Streams of one engine: tokens per second of all together, their replies, drafted and accepted tokens."""

    rate: float
    replies: tuple[tuple[int, ...], ...]
    num_drafted: int
    num_accepted: int


def run_speculation(settings: Settings, options: SpeculationBench, console: Console) -> int:
    """Measure all kinds, print the table and JSON lines; return 0. RekindleError if replies depend on drafts."""
    flags = {**flags_of(settings), "anticipate": "off"}
    with ExitStack() as stack, console.status("decoding"):
        own = {arm: Settings.load({**flags, "store": "off", "speculate": arm}) for arm in ARMS}
        engines = {arm: stack.enter_context(Engine(settings)) for arm, settings in own.items()}
        measured = [each for kind in KINDS for each in _measure(engines, kind, options)]
    console.print(_table(measured))
    deliver(measured, Origin.here("speculation", {**flags, **asdict(options), "out": None}), options.out, console)
    return 0


def _measure(engines: dict[str, Engine], kind: str, options: SpeculationBench) -> Iterator[Measurement]:
    """Measure one kind with each number of streams, the engines in turn."""
    for streams in options.streams:
        runs: dict[str, list[_Run]] = {arm: [] for arm in engines}
        for repeat in range(options.repeats + 1):  # the first one warms up
            for arm, engine in engines.items():
                name = "again" if kind == "sent again" else str(repeat)
                requests = [_request(kind, f"{streams}-{index}-{name}", options) for index in range(streams)]
                runs[arm].append(_run(engine, requests))
        if len({run.replies for each in runs.values() for run in each}) > 1:
            raise RekindleError(f"replies depend on drafts: {kind}, {streams} streams")
        for arm, each in runs.items():
            drafted, accepted = (sum(run.num_drafted for run in each[1:]), sum(run.num_accepted for run in each[1:]))
            detail = {"streams": streams, "drafted": drafted, "accepted": accepted}
            rates = tuple(run.rate for run in each[1:])
            yield Measurement(f"{kind}, {streams} streams", arm, "tok/s", rates, detail)


def _request(kind: str, name: str, options: SpeculationBench) -> GenerationRequest:
    """Return a request of an agent of its own."""
    calls = "\n".join(json.dumps({**CALL, "id": number}) for number in range(8))
    texts: dict[str, str] = {"tool calls": f"{calls}\nRepeat these calls.", "passage": f"{PASSAGE} Repeat this text."}
    sampling: dict[str, Any] = {"temperature": 0.0}
    if kind == "sampled":
        sampling = {"temperature": TEMPERATURE, "seed": options.seed}
    return GenerationRequest(
        messages=(Message("user", texts.get(kind, "Describe a harbour in winter.")),),
        agent=f"{kind}-{name}".replace(" ", "-"),
        params=SamplingParams(max_tokens=options.tokens, ignore_eos=True, **sampling),
    )


def _run(engine: Engine, requests: Sequence[GenerationRequest]) -> _Run:
    """Compute the prompts, then time the replies together."""
    for request in requests:
        engine.submit(replace(request, task="prefill")).result()
    before, began = engine.stats(), time.perf_counter()
    results = [generation.result() for generation in [engine.submit(request) for request in requests]]
    seconds, after = time.perf_counter() - began, engine.stats()
    replies = tuple(result.token_ids for result in results)
    return _Run(
        sum(map(len, replies)) / seconds,
        replies,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )


def _table(measured: Sequence[Measurement]) -> Table:
    """Build a table with a row per kind and number of streams."""
    shown = Table(title="Tokens per second, medians", title_justify="left")
    for name in ("reply", *ARMS, "times", "drafted", "accepted"):
        shown.add_column(name, justify="left" if name == "reply" else "right")
    arms = {(item.measure, item.arm): item for item in measured}
    for measure in dict.fromkeys(item.measure for item in measured):
        off, auto = (arms[measure, arm] for arm in ARMS)
        cells = (f"{off.median:.1f}", f"{auto.median:.1f}", f"{auto.median / off.median:.2f}")
        shown.add_row(measure, *cells, str(auto.detail["drafted"]), str(auto.detail["accepted"]))
    return shown
