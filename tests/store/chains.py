"""Tiny blocks for the store's tests: a layout of two parts, chains of ids, payloads that follow from them."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, BlockIdentity, chain_hashes, root_hash, tail_hash
from rekindle.compute.cpu.kernels.records import record_reader
from rekindle.config import StoreSettings
from rekindle.spec import KVLayout, LayerSpec
from rekindle.store.files.records import RecordFormat
from rekindle.store.files.sync import FileSystem
from rekindle.store.maintenance.room import OnLost, ignore
from rekindle.store.threads.writer import OnSaved
from rekindle.store.warm import BlockBytes, SequenceRecord, StoredBlock, WarmStore

SIZE = 16
LAYOUT = KVLayout(
    SIZE,
    (
        LayerSpec(0, 1, 1, 1, None, "fp32", "fp32"),
        LayerSpec(1, 1, 2, 1, 32, "bf16", "fp32"),
        LayerSpec(2, 1, 16, 16, None, "q4h", "q4h"),
    ),
)
PLAIN_LAYOUT = KVLayout(SIZE, tuple(layer for layer in LAYOUT.layers if layer.window is None))  # its first part alone
ALL_PARTS = tuple(part.index for part in LAYOUT.parts)
BLOCK_BYTES = sum(RecordFormat.of(LAYOUT, part.index).record_bytes for part in LAYOUT.parts)
FINGERPRINT = bytes(range(32))
READERS = {kernels: record_reader(kernels) for kernels in ("auto", "torch")}


def open_store(
    directory: Path,
    *,
    fs: FileSystem | None = None,
    shard_bytes: int = 1 << 15,
    clock: Callable[[], float] = lambda: 100.0,
    model: str = "",
    namespaces: Sequence[str] = ("default",),
    on_saved: OnSaved = ignore,
    on_lost: OnLost = ignore,
    layout: KVLayout = LAYOUT,
    kernels: Literal["auto", "torch"] = "auto",
    **settings: float,
) -> WarmStore:
    """An open store of the tiny layout, not started; few slots a shard, so that several are in play.

    `kernels`: whether these read its records, if there are some, or Python.
    """
    return WarmStore.open(
        directory,
        fingerprint=FINGERPRINT,
        layout=layout,
        settings=StoreSettings(**{"staging_bytes": 1 << 20, "disk_bytes": 1 << 24, **settings}),
        fs=fs,
        clock=clock,
        shard_bytes=shard_bytes,
        model=model,
        namespaces=namespaces,
        on_saved=on_saved,
        on_lost=on_lost,
        read_records=READERS[kernels],
    )


def fast_directory() -> Path:
    """A new directory, in memory where the system has such a place: these tests sync thousands of times."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))


@lru_cache(maxsize=4096)
def payload_of(name: bytes, part: int) -> np.ndarray:
    """The bytes a block has in these tests, read-only: they follow from its name."""
    seed = int.from_bytes(name[:8], "little") + part
    payload = np.random.default_rng(seed).integers(0, 256, LAYOUT.parts[part].payload_bytes, dtype=np.uint8)
    payload.setflags(write=False)
    return payload


@dataclass(frozen=True)
class Chain:
    """Blocks of a run of ids: full ones, then perhaps a tail, with all parts of the store's layout."""

    root: BlockHash
    ids: np.ndarray
    parts: tuple[int, ...] = ALL_PARTS

    @classmethod
    def of(cls, store: WarmStore, ids: Sequence[int], namespace: str = "default") -> Chain:
        root = root_hash(fingerprint=FINGERPRINT, namespace=namespace, cache_salt="", secret=store.secret)
        return cls(root, np.array(ids, dtype=np.uint32), tuple(range(store.index.num_parts)))

    @property
    def full_names(self) -> list[BlockHash]:
        return chain_hashes(self.root, self.ids, SIZE)

    @property
    def blocks(self) -> list[BlockBytes]:
        names = list(self.full_names)
        parents = [self.root, *names]
        if len(self.ids) % SIZE:
            names.append(tail_hash(parents[-1], self.ids[len(names) * SIZE :]))
        return [
            BlockBytes(
                BlockIdentity(name, parent, self.root, self.ids[i * SIZE : (i + 1) * SIZE]),
                {part: payload_of(name, part) for part in self.parts},
            )
            for i, (name, parent) in enumerate(zip(names, parents, strict=False))
        ]

    @property
    def head(self) -> BlockHash:
        return self.blocks[-1].identity.hash if len(self.ids) else self.root

    def record(
        self,
        agent: str,
        branch: int = 0,
        namespace: str = "default",
        *,
        num_tokens: int | None = None,
        last_use: float = 5.0,
    ) -> SequenceRecord:
        """The branch that ends where this chain does."""
        count = len(self.ids) if num_tokens is None else num_tokens
        return SequenceRecord(namespace, agent, branch, self.root, self.head, count, count, last_use, (count,))


def save(store: WarmStore, chain: Chain, agent: str = "ann", branch: int = 0, *, flush: bool = True) -> None:
    """Stage all blocks of a chain and move the agent's branch to its end."""
    for block in chain.blocks:
        while not store.stage(block):
            assert store.flush(10)
    store.save_turn(chain.record(agent, branch))
    if flush:
        assert store.flush(10)


@contextmanager
def one_batch(store: WarmStore) -> Iterator[None]:
    """What is staged and saved inside is one batch of the writer, however fast it is; durable at the end."""
    gate = threading.Event()
    store.writer.call(lambda ledger: gate.wait(60))
    yield
    gate.set()
    assert store.flush(10)


def load(store: WarmStore, blocks: Sequence[StoredBlock]) -> list[dict[int, np.ndarray]]:
    """Payloads per block, by part, as far as the load came; checked against the blocks' names."""
    parts: dict[tuple[int, int], np.ndarray] = {}
    counts: list[int] = []
    ended = threading.Event()

    def done(num_good: int) -> None:
        counts.append(num_good)
        ended.set()

    def deliver(first: int, run: Sequence[Mapping[int, np.ndarray]]) -> None:
        for i, payloads in enumerate(run, first):
            parts.update({(i, part): data.copy() for part, data in payloads.items()})

    store.load(blocks, deliver, done)
    assert ended.wait(60)
    assert len(counts) == 1
    loaded = [{part: parts[i, part] for part in block.parts} for i, block in enumerate(blocks[: counts[0]])]
    for block, payloads in zip(blocks, loaded, strict=False):
        for part, payload in payloads.items():
            assert np.array_equal(payload, payload_of(block.identity.hash, part)), "a wrong payload was delivered"
    return loaded


def warm_tokens(store: WarmStore, chain: Chain) -> int:
    """How many leading tokens of the chain can really be loaded, its tail included."""
    names = chain.full_names
    found = store.locate(names, parent=chain.root, ids=chain.ids[: len(names) * SIZE])
    count = len(load(store, found)) * SIZE
    if count == len(names) * SIZE < len(chain.ids):
        child = store.child(names[-1] if names else chain.root, chain.ids[count:])
        if child is not None and load(store, [child[0]]):
            count += child[1]
    return count
