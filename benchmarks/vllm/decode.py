"""How fast vLLM decodes, and how many tokens it holds, with its own kinds of KV and with our connector.

    make fleet-env && python -m benchmarks vllm-decode --kv auto --kv fp8 --kv native --streams 8 --context 4096

`auto`, `fp8`, `int4_per_token_head` and the like are values of vLLM's `kv_cache_dtype`; `native` and `q4h` are formats
of our records, of KV that vLLM computes with in its own precision, so these show what saving costs. A load whose
prompts do not fit in memory together is left out. On a GPU with graphs for decoding; nothing is compiled.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.vllm.decoding import Decoded, Load, Speed, measured
from benchmarks.vllm.engine import MODEL
from rekindle.errors import ConfigError
from rekindle_lab.record import Measurement, Origin, deliver


@dataclass(frozen=True, slots=True)
class DecodeBench:
    """The environment of vLLM, a model directory (None: the bundled one), kinds of KV, and loads."""

    python: Path
    model: Path | None
    kv: tuple[str, ...]
    streams: tuple[int, ...]
    contexts: tuple[int, ...]
    tokens: int
    out: Path | None


def run_decode(bench: DecodeBench, console: Console) -> int:
    """Measure all kinds, show and deliver each once it is done; 1 if one of them failed."""
    if not bench.python.is_file():
        raise ConfigError(f"there is no {bench.python}: run make fleet-env, or name another python that has vLLM")
    loads = [Load(streams, context) for context, streams in itertools.product(bench.contexts, bench.streams)]
    settings = {name: str(value) for name, value in asdict(bench).items()}
    origin, failed = Origin.here("vllm-decode", settings), False
    for kind in bench.kv:
        console.print(f"{kind}: {len(loads)} loads")
        with tempfile.TemporaryDirectory() as directory:
            decoded = measured(
                kind,
                loads,
                tokens=bench.tokens,
                directory=directory,
                python=str(bench.python.absolute()),
                model=str(bench.model or MODEL),
            )
        if decoded.failed is not None:
            failed = True
            console.print(f"{kind} failed:\n{decoded.failed}", markup=False)
        found = list(_measurements(kind, decoded))
        show(found, console)
        deliver(found, origin, bench.out, console)
    return int(failed)


def show(found: Sequence[Measurement], console: Console) -> None:
    """A row for each measure of each kind."""
    table = Table("KV", "measure", "median", "min", "max", "unit", "tokens/s")
    for each in found:
        low, high = min(each.values), max(each.values)
        rate = str(each.detail.get("tokens_per_s", ""))
        table.add_row(each.arm, each.measure, f"{each.median:,.1f}", f"{low:,.1f}", f"{high:,.1f}", each.unit, rate)
    console.print(table)


def _measurements(kind: str, decoded: Decoded) -> Iterator[Measurement]:
    if decoded.capacity:
        yield Measurement("capacity", kind, "tokens", (float(decoded.capacity),))
    for speed in decoded.speeds:
        yield from _of_load(kind, speed)


def _of_load(kind: str, speed: Speed) -> Iterator[Measurement]:
    load = speed.load
    name = f"{load.streams} x {load.context:,}"
    computed = round(load.streams * load.context / speed.prefill_s)
    yield Measurement(f"prefill {name}", kind, "ms", (speed.prefill_s * 1e3,), {"tokens_per_s": computed})
    rate = round(load.streams / statistics.mean(speed.step_s))  # steps that save are slower, and count
    steps = tuple(step * 1e3 for step in speed.step_s)
    yield Measurement(f"step of {name}", kind, "ms", steps, {"tokens_per_s": rate})
