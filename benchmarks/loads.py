"""`python -m benchmarks loads`: stored blocks from the page cache into hot memory, read by Python and by the kernels.

Arms of an encrypted store show what decrypting them costs.

    python -m benchmarks loads --repeats 15

Blocks in 4 bits of the bundled model, of 24 layers with 2 heads of 64, and of 32 layers with 8 heads of 128, filled
with random bytes. A load reads all of them once, verified, to where attention finds them; arms take turns, each on a
store that was just opened and after a first load that does not count. CPU is that of the whole process.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rekindle.cache.blocks.hashing import BlockIdentity, chain_hashes, root_hash
from rekindle.compute.cpu.kernels.records import record_reader
from rekindle.config import StoreSettings
from rekindle.errors import ConfigError
from rekindle.kv.arena import KVArena
from rekindle.spec import KVLayout, LayerSpec
from rekindle.store.values import BlockBytes, StoredBlock
from rekindle.store.warm import WarmStore
from rekindle_lab.record import Measurement, Origin, deliver

BLOCK_TOKENS = 64
SHAPES = {"bundled model": (6, 2, 64), "24 layers": (24, 2, 64), "8B": (32, 8, 128)}  # layers, K/V heads, their size
ARMS = {f"{name}, {readers}": (name, readers) for name in ("python", "kernels", "encrypted") for readers in (1, 2)}
KEY = "5e" * 32
FINGERPRINT = bytes(32)
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class LoadBench:
    """How many blocks a load has, and loads of each arm; `out` None prints the JSON lines after the table."""

    blocks: int = 64
    repeats: int = 15
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.repeats < 1:
            raise ConfigError("give at least one block and one repeat")


class Stored:
    """Blocks of one shape in a directory, and the hot memory that they are loaded to."""

    def __init__(self, directory: Path, shape: tuple[int, int, int], options: LoadBench) -> None:
        layers, heads, size = shape
        specs = (LayerSpec(index, heads, size, size, None, "q4h", "q4h") for index in range(layers))
        self.layout = KVLayout(BLOCK_TOKENS, tuple(specs))
        self.block_bytes = self.layout.parts[0].payload_bytes
        self._directories = {False: directory / "clear", True: directory / "encrypted"}
        self._root = root_hash(fingerprint=FINGERPRINT, namespace="loads", cache_salt="", secret=bytes(16))
        self._ids = np.arange(options.blocks * BLOCK_TOKENS, dtype=np.uint32)
        self._names = chain_hashes(self._root, self._ids, BLOCK_TOKENS)
        self._arena = KVArena(self.layout, options.blocks)
        self._payloads = np.random.default_rng(options.seed).integers(
            0, 256, (options.blocks, self.block_bytes), dtype=np.uint8
        )

    def open(self, arm: str) -> WarmStore:
        """Open the store as an arm reads it, and start its threads."""
        name, readers = ARMS[arm]
        is_encrypted = name == "encrypted"
        store = WarmStore.open(
            self._directories[is_encrypted],
            fingerprint=FINGERPRINT,
            layout=self.layout,
            settings=StoreSettings(readers=readers, disk_bytes=4 << 30, key=KEY if is_encrypted else None),
            read_records=record_reader("torch" if name == "python" else "auto"),
        )
        store.start()
        return store

    def save(self) -> None:
        """Save all blocks in both stores."""
        for arm in ("python, 1", "encrypted, 1"):
            self._save(self.open(arm))

    def _save(self, store: WarmStore) -> None:
        for number, (name, payload) in enumerate(zip(self._names, self._payloads, strict=True)):
            ids = self._ids[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
            parent = self._names[number - 1] if number else self._root
            while not store.stage(BlockBytes(BlockIdentity(name, parent, self._root, ids), {0: payload})):
                store.flush(WAIT_S)
        store.close()

    def load(self, store: WarmStore) -> tuple[float, float]:
        """Load all blocks; return the seconds and the CPU seconds that it took."""
        found = store.locate(self._names, parent=self._root, ids=self._ids)
        num_good: Future[int] = Future()

        def room(first: int, run: Sequence[StoredBlock]) -> list[dict[int, np.ndarray]]:
            return [{0: self._arena.room(block, 0)} for block in range(first, first + len(run))]

        began, cpu = time.perf_counter(), time.process_time()
        store.load(found, lambda first, run: None, num_good.set_result, room)
        assert num_good.result(WAIT_S) == len(self._names), "a block did not come back"
        return time.perf_counter() - began, time.process_time() - cpu

    def check(self) -> None:
        """Assert that hot memory has what was saved, and empty it."""
        assert np.array_equal(self._arena.parts[0].numpy(), self._payloads), "other bytes came back"
        self._arena.parts[0].zero_()


def measure(shape: str, options: LoadBench) -> list[Measurement]:
    """Load blocks of one shape by every arm in turn."""
    seconds: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(prefix="rekindle-loads-") as directory:
        stored = Stored(Path(directory), SHAPES[shape], options)
        stored.save()
        for _, arm in itertools.product(range(options.repeats), ARMS):
            store = stored.open(arm)
            stored.load(store)
            seconds[arm].append(stored.load(store))
            store.close()
            stored.check()
    num_bytes = options.blocks * stored.block_bytes
    detail = {"block_bytes": stored.block_bytes}
    return [
        measurement
        for arm, took in seconds.items()
        for measurement in (
            Measurement(f"{shape}: rate", arm, "GB/s", tuple(num_bytes / wall / 1e9 for wall, _ in took), detail),
            Measurement(f"{shape}: CPU of a block", arm, "µs", tuple(cpu / options.blocks * 1e6 for _, cpu in took)),
        )
    ]


def run_loads(options: LoadBench, console: Console) -> int:
    """Load blocks of all shapes, print table and lines; return 0. Wrong bytes fail an assertion."""
    if record_reader("auto") is None:
        raise ConfigError("there are no kernels to measure: install g++, then run make kernels")
    measured = [item for shape in SHAPES for item in measure(shape, options)]
    shown = Table(title="Loads from the page cache, by readers", title_justify="left")
    for name in ("", *ARMS):
        shown.add_column(name, justify="right" if name else "left")
    for name in dict.fromkeys(item.measure for item in measured):
        row = [item for item in measured if item.measure == name]
        cells = (f"{item.median:.3g} ({min(item.values):.3g}-{max(item.values):.3g})" for item in row)
        shown.add_row(f"{name}, {row[0].unit}", *cells)
    console.print(shown)
    deliver(measured, Origin.here("loads", {**asdict(options), "out": None}), options.out, console)
    return 0
