"""vLLM alone, and with our connector in both formats: cold, hot, and warm after a kill -9.

    make fleet-env && python -m benchmarks vllm --model /tmp/q6 --tokens 512 --tokens 2048

Every prompt is random token ids and asks for one token. One process serves each prompt cold and then, longer by 48
tokens, hot; it is killed with SIGKILL once the store has written everything. A second one serves the prompts with 48
other tokens, warm. `saving` is the connector's time in steps that compute a cold prompt, `loading` in those of a warm
one. A first prompt in each process warms it up and does not count. One thread; vLLM is eager.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.vllm.engine import MODEL, Answer, Prompt, served
from rekindle.errors import ConfigError
from rekindle_lab.record import Measurement, Origin, deliver

ARMS = ("alone", "native", "q4h")
GROWTH = 48  # tokens by which a prompt grows
FIRST_ID, LAST_ID = 300, 4000  # in every vocabulary, and no control tokens


@dataclass(frozen=True, slots=True)
class VllmBench:
    """The environment of vLLM, a model directory (None: the bundled one), and the prompts."""

    python: Path
    model: Path | None = None
    lengths: tuple[int, ...] = (2048,)
    repeats: int = 3
    seed: int = 0
    disk: str = "20GB"
    staging: str = "512MiB"
    batched: int = 2048
    out: Path | None = None


def run_vllm(bench: VllmBench, console: Console) -> int:
    """Measure all arms, show and deliver each once it is done."""
    if not bench.python.is_file():
        raise ConfigError(f"there is no {bench.python}: run make fleet-env, or name another python that has vLLM")
    settings = {name: str(value) for name, value in asdict(bench).items()}
    origin = Origin.here("vllm", settings)
    for arm in ARMS:
        console.print(f"{arm}: {bench.repeats} prompts of {', '.join(map(str, bench.lengths))} tokens")
        measured = list(measure_arm(bench, arm))
        show(measured, console)
        deliver(measured, origin, bench.out, console)
    return 0


def measure_arm(bench: VllmBench, arm: str) -> Iterator[Measurement]:
    """Cold, hot and warm of one arm, by length of the prompts; alone there is no warm."""
    prompts = {n: [_ids(bench.seed + n + number, n) for number in range(bench.repeats)] for n in bench.lengths}
    every = [ids for of_length in prompts.values() for ids in of_length]
    warming = [Prompt(_ids(seed, bench.lengths[0]), 1) for seed in (3_000, 4_000)]
    with tempfile.TemporaryDirectory() as place:
        directory = None if arm == "alone" else Path(place)
        pairs = [Prompt(ids, 1) for each in every for ids in (each, each + _ids(1_000, GROWTH))]
        answers = _served(bench, directory, arm, [warming[0], *pairs])[1:]
        for n, cold, hot in zip(bench.lengths, *(_by_length(bench, answers[side::2]) for side in (0, 1)), strict=True):
            yield _measurement(f"cold {n:,}", arm, cold)
            yield _measurement(f"hot {n:,}, grown", arm, hot)
            if directory is not None:
                yield Measurement(f"saving {n:,}", arm, "ms", tuple(answer.save_s * 1e3 for answer in cold))
        if directory is None:
            return
        other = [Prompt(ids + _ids(2_000, GROWTH), 1) for ids in every]
        warm = _served(bench, directory, arm, [warming[1], *other])[1:]
        for n, found in zip(bench.lengths, _by_length(bench, warm), strict=True):
            yield _measurement(f"warm {n:,} after kill -9, grown", arm, found)
            yield Measurement(f"loading {n:,}", arm, "ms", tuple(answer.load_s * 1e3 for answer in found))


def _by_length(bench: VllmBench, answers: Sequence[Answer]) -> list[Sequence[Answer]]:
    return [answers[at : at + bench.repeats] for at in range(0, len(answers), bench.repeats)]


def show(measured: Sequence[Measurement], console: Console) -> None:
    """A row for each measure of each arm."""
    table = Table("arm", "measure", "median ms", "min", "max", "reused tokens")
    for each in measured:
        low, high = min(each.values), max(each.values)
        reused = str(each.detail.get("reused_tokens", ""))
        table.add_row(each.arm, each.measure, f"{each.median:.0f}", f"{low:.0f}", f"{high:.0f}", reused)
    console.print(table)


def _served(bench: VllmBench, directory: Path | None, arm: str, prompts: list[Prompt]) -> list[Answer]:
    longest = max(len(prompt.ids) for prompt in prompts) + 16
    return served(
        directory,
        prompts,
        record_format="native" if arm == "alone" else arm,
        python=str(bench.python.absolute()),
        model=str(bench.model or MODEL),
        max_model_len=longest,
        max_num_batched_tokens=bench.batched,
        store={"disk": bench.disk, "staging": bench.staging},
    )


def _measurement(measure: str, arm: str, answers: Sequence[Answer]) -> Measurement:
    reused = sorted({answer.reuse.get("reused_tokens", answer.cached_tokens) for answer in answers})
    values = tuple(answer.seconds * 1e3 for answer in answers)
    return Measurement(measure, arm, "ms", values, {"reused_tokens": reused})


def _ids(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(FIRST_ID, LAST_ID, count)]
