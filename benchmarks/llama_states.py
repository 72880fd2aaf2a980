"""What the state of a llama-server's slot costs as it grows: read after a turn, restored before one, to the others.

The product's own parts do it: its command and flags, its RAM disk, its copies between files and blocks. Not measured is
the store, which writes the new blocks in the background.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from rekindle.errors import ConfigError
from rekindle.harness.own_server import OwnServer
from rekindle.kv.arena import KVArena
from rekindle_backends.client import Address, Backend
from rekindle_backends.llama.command import llama_command
from rekindle_backends.llama.layout import BLOCK_TOKENS
from rekindle_backends.llama.probe import described, probe
from rekindle_backends.llama.slot_folder import RamDisk
from rekindle_backends.llama.states import States

LONG, OTHER = 0, 1  # the slot whose state is moved, and one that computes meanwhile
SPARE_TOKENS = 512  # of a slot, after its prompt
NUM_DECODED = 60
ANSWER_S = 3600.0


@dataclass(frozen=True, slots=True)
class StatesBench:
    """What is measured: states of these `lengths`, of which `new` tokens are a turn's, each so many times."""

    model: Path
    lengths: tuple[int, ...]
    flags: str = "-t 1"
    new: int = 108
    repeats: int = 5


@dataclass
class Rig:
    """A llama-server of two slots as the product starts it, and the states of its slots."""

    bench: StatesBench
    backend: Backend
    own: OwnServer
    states: States
    ram_disk: RamDisk
    arena: KVArena
    ids: list[int] = field(default_factory=list)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self.backend.run(self.backend.fetch("POST", path, body, timeout_s=ANSWER_S)).result()
        assert answer[0] == 200, answer
        return answer[1]

    def compute(self, length: int) -> float:
        """Have the long slot compute the first tokens; return the seconds."""
        began = time.perf_counter()
        body = {"prompt": self.ids[:length], "n_predict": 1, "id_slot": LONG, "cache_prompt": True, "temperature": 0}
        self.post("/completion", body)
        return time.perf_counter() - began

    def saved_by_server(self, num_tokens: int) -> tuple[float, int]:
        """Seconds that llama-server's own clock says for writing a file, in which it does nothing else; its bytes."""
        name = self.ram_disk.new_name(int(num_tokens * self.arena.layout.token_bytes))
        try:
            found = self.post(f"/slots/{LONG}?action=save", {"filename": name})
        finally:
            self.ram_disk.remove(name)
        return found["timings"]["save_ms"] / 1e3, found["n_written"]

    def gaps(self, work: Callable[[], object]) -> list[float]:
        """Seconds between tokens of the other slot, while `work` is done on a thread of its own again and again."""
        found: list[float] = []
        ended = threading.Event()

        def again() -> None:
            while not ended.wait(0.2):
                work()

        worker = threading.Thread(target=again)
        body = {"prompt": self.ids[:50], "n_predict": NUM_DECODED, "id_slot": OTHER, "stream": True, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {self.own.command.key}"}
        url = f"{self.own.command.url}/completion"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=ANSWER_S) as answer:
            last = None
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                now = time.perf_counter()
                if last is None:
                    worker.start()
                else:
                    found.append(now - last)
                last = now
        ended.set()
        worker.join()
        return found


@contextmanager
def rig(bench: StatesBench) -> Iterator[Rig]:
    """Start it all."""
    with ExitStack() as opened:
        ram_disk = RamDisk()
        opened.callback(ram_disk.close)
        flags = [*bench.flags.split(), "-np", "2"]
        context = max(bench.lengths) + SPARE_TOKENS
        kept = ("--slot-save-path", f"{ram_disk.path}/", "--cache-ram", "0")
        own = OwnServer(llama_command(bench.model, flags=flags, max_context=context, arguments=kept))
        own.start()
        backend = Backend(Address(own.command.url, own.command.key, ANSWER_S), own=own)
        backend.start()
        opened.callback(backend.stop)
        shape = backend.run(probe(backend, ram_disk)).result().shape
        probed = described(shape, file=bench.model, max_context=context, depends_on={})
        if probed.layout.ending:
            raise ConfigError("models with windows are not measured here: name one with full attention alone")
        arena = KVArena(probed.layout, 1 + -(-context // BLOCK_TOKENS))
        states = States(backend, ram_disk, arena, probed.shape)
        opened.callback(states.close)
        made = Rig(bench, backend, own, states, ram_disk, arena)
        text = " ".join(f"Lamp {at} was lit for {at * 7919 % 101} hours." for at in range(max(bench.lengths) // 6))
        made.ids = made.post("/tokenize", {"content": text, "add_special": True})["tokens"]
        assert len(made.ids) >= max(bench.lengths), "the text is too short"
        yield made


def measured(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each time."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found


def shown(seconds: list[float]) -> str:
    """The median of times in ms, with the least and the most."""
    median, least, most = (each * 1e3 for each in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{median:.3g} ({least:.3g}-{most:.3g})"


def row(made: Rig, length: int) -> list[str]:
    """Measure a state of so many tokens."""
    computed, bench, states, run = made.compute(length), made.bench, made.states, made.backend.run
    saves = [made.saved_by_server(length) for _ in range(bench.repeats)]
    file = run(states.save(LONG, length)).result()
    num_tokens, ids = len(file.tokens), file.tokens.astype(np.uint32)
    blocks = range(-(-num_tokens // BLOCK_TOKENS))
    run(states.take(file, blocks, 0, num_tokens)).result()  # also what is restored below
    read = measured(
        lambda: run(
            states.take(run(states.save(LONG, length)).result(), blocks, num_tokens - bench.new, num_tokens)
        ).result(),
        bench.repeats,
    )

    def restore() -> None:
        run(states.restore(LONG, blocks, ids, num_tokens, lambda: None)).result()

    back = measured(restore, bench.repeats)
    return [
        f"{num_tokens:,}",
        f"{computed:.1f} s",
        f"{saves[0][1] / 1e6:.1f} MB",
        shown([seconds for seconds, _ in saves]),
        shown(read),
        shown(back),
        shown(made.gaps(lambda: None)),
        shown(made.gaps(lambda: made.saved_by_server(length))),
        shown(made.gaps(restore)),
    ]


def run_states_bench(bench: StatesBench, console: Console) -> int:
    """Print a row for each length: times in ms, but seconds for computing what the row before had not."""
    table = Table(
        "tokens",
        "computed",
        "file",
        "written by llama-server",
        f"read: saved, {bench.new} new tokens copied",
        "restored: put together, read by llama-server",
        "gaps of another slot, alone",
        "while states are saved",
        "while states are restored",
    )
    with rig(bench) as made:
        for length in sorted(bench.lengths):
            table.add_row(*row(made, length))
    console.print(table)
    return 0
