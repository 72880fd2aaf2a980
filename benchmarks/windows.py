"""What models with sliding windows or recurrent layers keep: computed for the layers of large models, measured on a
conversation.

    python -m benchmarks windows --context 32768
    python -m benchmarks windows --model DIR --context 8192

Three arms: all parts of all blocks, as without windows that end, and with a snapshot of the states at every block; one
resume point, the end of the conversation; plain KV in 16 bits that ends with its window, and one state, as other
engines have it. With a model, an agent's conversation grows to this context turn by turn, and what is then on disk is
compared with the same. Bytes are exact.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.errors import ConfigError
from rekindle.harness.client import flags_of
from rekindle.model.families import FAMILIES
from rekindle.model.params import SamplingParams
from rekindle.spec import KVLayout
from rekindle_lab.record import Measurement, Origin, deliver

ARMS = ("all parts", "windows end", "16 bits")
TURN_TOKENS, REPLY_TOKENS = 512, 8


# Models with parts that end, by the layers of their configs.
SHAPES = {
    family.example.name: family.example.layout
    for family in FAMILIES
    if family.example is not None and family.example.layout.ending
}


@dataclass(frozen=True, slots=True)
class WindowBench:
    """Tokens of a conversation; `seed` of those that are measured."""

    context: int = 32768
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.context < TURN_TOKENS:
            raise ConfigError(f"give a context of at least {TURN_TOKENS} tokens")


def run_windows(settings: Settings, options: WindowBench, console: Console) -> int:
    """Compute the shapes, or measure a model if one is named; print the table and JSON lines; return 0."""
    if settings.model.model is None:
        measured = [each for name, layout in SHAPES.items() for each in _kept(name, layout, options.context)]
    else:
        with console.status("a conversation grows"):
            measured = list(_conversation(settings, options))
    console.print(_table(measured))
    deliver(
        measured, Origin.here("windows", {**flags_of(settings), **asdict(options), "out": None}), options.out, console
    )
    return 0


def _kept(name: str, layout: KVLayout, num_tokens: int) -> Iterator[Measurement]:
    """Yield what each arm keeps of a conversation, in bytes."""
    num_blocks = -(-num_tokens // layout.block_tokens)
    plain = sum(
        2 * layer.num_kv_heads * (layer.k_dim + layer.v_dim) * min(num_tokens, layer.window or num_tokens)
        for layer in layout.layers
    )
    plain += 0 if layout.state_part is None else layout.state_part.payload_bytes
    sizes = (num_blocks * layout.block_bytes, layout.kept_bytes(num_tokens), plain)
    for arm, size in zip(ARMS, sizes, strict=True):
        yield Measurement(name, arm, "bytes", (float(size),), {"tokens": num_tokens})


def _conversation(settings: Settings, options: WindowBench) -> Iterator[Measurement]:
    """Yield what is kept of a conversation of random tokens, computed and on disk."""
    chooser = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="rekindle-windows-") as directory:
        own = Settings.load({**flags_of(settings), "store": directory, "anticipate": "off"})
        with Engine(own) as engine:
            context, ids = min(options.context, engine.max_context), list[int]()
            params = SamplingParams(temperature=0.0, max_tokens=REPLY_TOKENS, ignore_eos=True)
            while len(ids) + TURN_TOKENS <= context:
                ids += (chooser.randrange(engine.spec.vocab_size) for _ in range(TURN_TOKENS - REPLY_TOKENS))
                request = GenerationRequest(token_ids=tuple(ids), agent="ada", params=params)
                ids += engine.submit(request).result().token_ids
            engine.flush()
            yield from _kept("computed", engine.spec.layout, len(ids))
            store = engine.stats().store
            assert store is not None, "the store is on"
            yield Measurement("on disk", ARMS[1], "bytes", (float(store["used_bytes"]),), {"tokens": len(ids)})


def _table(measured: list[Measurement]) -> Table:
    """Build a table with a row for each shape, or for what was measured of one."""
    shown = Table(title=f"Bytes kept of {measured[0].detail['tokens']:,} tokens", title_justify="left")
    for name in ("", *ARMS):
        shown.add_column(name, justify="right" if name else "left")
    found = {(item.measure, item.arm): f"{item.median / 1e6:,.1f} MB" for item in measured}
    for measure in dict.fromkeys(item.measure for item in measured):
        shown.add_row(measure, *(found.get((measure, arm), "") for arm in ARMS))
    return shown
