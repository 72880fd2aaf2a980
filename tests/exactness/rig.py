"""An engine core without threads, stepped by the test, over a tiny model: every path KV can come to be on.

`generate` runs ids through it and returns the answer; `stored` reads back the block bytes of a sequence; `compute`
runs ids past the scheduler, in any pieces.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rekindle.cache.blocks.hashing import Ids, chain_hashes
from rekindle.cache.blocks.pool import BlockPool
from rekindle.cache.blocks.windows import WindowSlots
from rekindle.compute.cpu.kernels.records import record_reader
from rekindle.compute.load import load_model
from rekindle.config import EngineSettings, ModelSettings, StoreSettings
from rekindle.engine.blocks.loads import Load
from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.core.background import IdleWork
from rekindle.engine.core.chain_checks import checks_of
from rekindle.engine.core.core import EngineCore
from rekindle.engine.core.costs import StepCosts
from rekindle.engine.core.scheduler import Scheduler
from rekindle.engine.core.speculation import Speculation
from rekindle.engine.factory import chunk_multiple
from rekindle.engine.generation import Generation
from rekindle.engine.request import NO_MATCH, FinishedTurn, Reply, Request, RequestTimes, State
from rekindle.engine.sequence import Sequence
from rekindle.engine.types import ChatResult, Reuse, Task
from rekindle.kv.arena import KVArena
from rekindle.model.batch import SequenceStep
from rekindle.model.loaded import LoadedModel, Runner
from rekindle.model.params import SamplingParams
from rekindle.model.runner import ModelRunner
from rekindle.model.sampler import SamplerState
from rekindle.store.files.sync import FileSystem
from rekindle.store.values import SequenceRecord
from rekindle.store.warm import WarmStore
from rekindle.text.prompt import PromptEncoder
from rekindle.text.stream import TextStream
from tests.engine.fixed_costs import FixedCosts
from tests.tiny_models import DTYPES

BLOCK_TOKENS = 16
SECRET = b"s" * 32
LOAD_TIMEOUT_S = 60.0
ROUNDED: dict[str, Literal["int8", "int4"]] = {"int8": "int8", "int4": "int4"}
# Steps are planned by size, not by time, unless a test is about time: the bound is out of reach.
BY_SIZE = EngineSettings(max_stall_s=1e6)


def load(directory: Path, dtype: str, kv: str) -> LoadedModel:
    """`kv` "native" keeps K and V as computed, also in float64, which no setting offers; ROUNDED: bf16 but weights."""
    settings = ModelSettings(model=str(directory), device="cpu", threads=1, weights=ROUNDED.get(dtype, "native"))
    dtype = "bf16" if dtype in ROUNDED else dtype
    object.__setattr__(settings, "kv", dtype if kv == "native" else kv)
    compute = DTYPES[dtype]
    return load_model(settings, block_tokens=BLOCK_TOKENS, max_context=None, format_map_dir=None, compute_dtype=compute)


encoder_of = cache(PromptEncoder.from_dir)


@dataclass(frozen=True, eq=False)
class BlockBytes:
    """Bytes of a block's parts; None for a window's part that has ended. Equal if those are that both have."""

    parts: tuple[bytes | None, ...]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, BlockBytes) and self.parts[0] is not None and other.parts[0] is not None
        return all(a is None or b is None or a == b for a, b in zip(self.parts, other.parts, strict=True))

    __hash__ = None


@dataclass
class Rig:
    """One core over one loaded model. `max_chunk_tokens` is the largest chunk; `store_dir` adds a warm tier.

    `clock` is the core's. A load that ends is told to `report_load`, without one to the next step. Up to `max_draft`
    tokens are drafted for each sequence, as many as there are, since they cost nothing by `draft_costs`.
    """

    loaded: LoadedModel
    num_blocks: int = 96
    max_chunk_tokens: int = 512
    store_dir: Path | None = None
    fs: FileSystem | None = None
    settings: EngineSettings = BY_SIZE
    costs: StepCosts = field(default_factory=StepCosts)
    clock: Callable[[], float] = time.perf_counter
    max_draft: int = 0
    draft_costs: StepCosts = field(default_factory=lambda: FixedCosts(base_s=0.01, row_s=0.0, row_context_s=0.0))
    report_load: Callable[[Load, int], None] | None = None
    checked: int = 0  # one of how many restored blocks is computed again
    computed_by: int = 1  # what computes, as the store knows it
    window_slots: int | None = None  # of each window; none: one for every block
    turns: list[FinishedTurn] = field(default_factory=list)
    arena_type: type[KVArena] = KVArena
    runner_type: Callable[[LoadedModel, KVArena], Runner] = ModelRunner

    def __post_init__(self) -> None:
        layout = self.loaded.spec.layout
        num_slots = 1 + (self.window_slots or self.num_blocks)
        windows = [
            WindowSlots(kind, num_slots=num_slots, num_blocks=self.num_blocks) for kind in layout.ending.values()
        ]
        self.arena = self.arena_type(layout, self.num_blocks, "cpu", windows)
        self.runner = self.runner_type(self.loaded, self.arena)
        self.pool = BlockPool(self.num_blocks, layout.block_tokens, windows=windows)
        self.encoder = encoder_of(self.loaded.directory)
        self._reports: queue.SimpleQueue[tuple[Load, int]] = queue.SimpleQueue()
        self.store: WarmStore | None = None
        if self.store_dir is not None:
            fingerprint = self.loaded.spec.fingerprint
            settings = StoreSettings(dir=self.store_dir)
            self.store = WarmStore.open(
                self.store_dir,
                fingerprint=fingerprint,
                layout=layout,
                settings=settings,
                fs=self.fs,
                read_records=record_reader("auto") if self.fs is None else None,
                computed_by=self.computed_by,
            )
            self.store.start()
        self.cache = PrefixCache(
            pool=self.pool,
            arena=self.arena,
            store=self.store,
            fingerprint=self.loaded.spec.fingerprint,
            secret=self.store.secret if self.store else SECRET,
            min_reuse_tokens=1,
            report_load=self.report_load or (lambda load, good: self._reports.put((load, good))),
        )
        self.scheduler = Scheduler(
            self.settings, self.costs, max_chunk_tokens=self.max_chunk_tokens, chunk_multiple=chunk_multiple(layout)
        )
        self.core = EngineCore(
            runner=self.runner,
            cache=self.cache,
            scheduler=self.scheduler,
            checks=checks_of(
                cache=self.cache,
                scheduler=self.scheduler,
                runner=self.runner,
                store=self.store,
                one_in=self.checked,
            ),
            speculation=Speculation(self.draft_costs, max_tokens=self.max_draft, max_step_s=1.0),
            min_reuse_tokens=1,
            on_turn=self.turns.append,
            clock=self.clock,
        )

    def request(self, ids: Ids, new_tokens: int, reuse: Reuse = "continuation", **params: Any) -> Request:
        """Queue a request for `new_tokens` tokens, greedy unless `params` say otherwise."""
        request = self.unqueued(ids, new_tokens, reuse, **params)
        self.core.add(request)
        return request

    def unqueued(self, ids: Ids, new_tokens: int, reuse: Reuse = "continuation", **given: Any) -> Request:
        """A request that nobody knows of yet. Requests on the very same array of ids are prepared together."""
        params = SamplingParams(**{"max_tokens": max(1, new_tokens), "temperature": 0.0, **given})
        return Request(
            namespace="default",
            agent="a",
            sequence=self._sequence(ids, "generate", new_tokens, reuse),
            match=NO_MATCH,
            canonical_tokens=0,
            num_replies=None,
            reply=Reply(Generation(), SamplerState.create(params, lambda: 0), TextStream(self.encoder, ())),
            times=RequestTimes(submitted=self.clock()),
        )

    def _sequence(
        self, ids: Ids, task: Task | Literal["idle"], new_tokens: int = 0, reuse: Reuse = "continuation"
    ) -> Sequence:
        return Sequence(
            root=self.cache.root("default"),
            prompt_ids=np.asarray(ids, dtype=np.uint32),
            table=self.cache.new_table(),
            reuse=reuse,
            task=task,
            max_new_tokens=new_tokens,
        )

    def task(self, ids: Ids, task: Task) -> Request:
        """Queue a request without a reply."""
        request = self.unqueued(ids, 0)
        request.sequence.task = task
        self.core.add(request)
        return request

    def idle(self, ids: Ids, agent: str) -> IdleWork:
        """A prompt to compute in idle time, not queued."""
        return IdleWork("default", agent, self._sequence(ids, "idle"))

    def idle_work(self, ids: Ids, agent: str = "idle") -> IdleWork:
        """Queue the computing of a prompt for idle time."""
        work = self.idle(ids, agent)
        self.core.add(work)
        return work

    def end_idle_work(self) -> None:
        """With no request left: step until there is no idle work either."""
        while len(self.core.background):
            if not self.core.has_work:
                self.wait_for_load()
            self.step()

    def step(self) -> None:
        """One step of the core, loads that have reported first; every invariant holds after it."""
        while not self._reports.empty():
            self.wait_for_load()
        self.core.step()
        self.core.check()

    def wait_for_load(self) -> None:
        """Take in one load, when it has ended; fails if none does in good time."""
        self.core.finish_load(*self._reports.get(timeout=LOAD_TIMEOUT_S))

    def end_loads(self) -> None:
        """With no request left: take in the loads that nobody waits for any more, which hold blocks until then."""
        while self._is_idle() and self.pool.num_held:
            self.wait_for_load()

    def _is_idle(self) -> bool:
        """Nothing runs and nothing waits for a step (loads may be under way)."""
        return not self.scheduler.running and not self.scheduler.waiting

    def finish(self, *requests: Request) -> list[ChatResult]:
        """Step until these have ended."""
        for _ in range(100_000):
            if all(request.state is State.FINISHED for request in requests):
                return [request.reply.generation.result() for request in requests]
            if self._is_idle() and self.scheduler.loading:
                self.wait_for_load()
            self.step()
        raise AssertionError("requests do not end")

    def generate(self, ids: Ids, new_tokens: int, reuse: Reuse = "continuation", **params: Any) -> ChatResult:
        """The answer to `ids`, greedy unless `params` say otherwise."""
        return self.finish(self.request(ids, new_tokens, reuse, **params))[0]

    def stored(self, ids: Ids) -> list[BlockBytes]:
        """Bytes of every block of the sequence; asserts that all of it is in memory."""
        array, size = np.asarray(ids, dtype=np.uint32), self.pool.block_tokens
        root = self.cache.root("default")
        blocks = self.pool.try_reuse_prefix(root, array)
        assert len(blocks) == len(array) // size, f"{len(blocks)} blocks of {len(array)} tokens are in memory"
        read = [self._read(block, size) for block in blocks]
        rest = array[len(blocks) * size :]
        if len(rest):
            parent = self.pool.name(blocks[-1]) if blocks else root
            assert parent is not None
            child = self.pool.find_child(parent, rest)
            assert child is not None and child[1] == len(rest), "the tail is not in memory"
            read.append(self._read(child[0], len(rest)))
        self.pool.release_all(blocks)
        return read

    def num_hot(self, ids: Ids) -> int:
        """How many leading tokens of the sequence are in memory; looking is no use of them."""
        array, root = np.asarray(ids, dtype=np.uint32), self.cache.root("default")
        return self.cache.num_hot_tokens(root, array, tuple(chain_hashes(root, array, self.pool.block_tokens)))

    def _read(self, block: int, num_tokens: int) -> BlockBytes:
        parts: list[bytes | None] = []
        for part in self.loaded.spec.layout.parts:
            out = np.zeros(part.payload_bytes, dtype=np.uint8)
            if self.arena.has(part.index, block):
                self.arena.read(block, part.index, num_tokens, out)
            parts.append(out.tobytes() if self.arena.has(part.index, block) else None)
        return BlockBytes(tuple(parts))

    def save(self) -> None:
        """Make every finished turn durable, as the intake would."""
        assert self.store is not None
        for number, turn in enumerate(self.turns):
            self.cache.saving.add(
                SequenceRecord(
                    *("default", f"a{number}", 0, turn.root, turn.head, turn.head_tokens, 0, 1.0 + number),
                    resume_points=turn.resume_points,
                )
            )
        while len(self.cache.saving):
            self.step()
            time.sleep(0.001)
        assert self.store.flush(30.0)

    def reopened(self) -> Rig:
        """A new process, as far as the cache can tell: empty memory on the same directory."""
        self.save()
        assert self.store is not None
        self.store.close()
        return Rig(
            self.loaded,
            self.num_blocks,
            self.max_chunk_tokens,
            self.store_dir,
            max_draft=self.max_draft,
            window_slots=self.window_slots,
            arena_type=self.arena_type,
        )

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    def compute(self, ids: Ids, pieces: Iterable[int]) -> tuple[torch.Tensor, list[BlockBytes]]:
        """Teacher-forced logits [len(ids), vocab], run in these pieces on private blocks, and the blocks' bytes."""
        table, size = self.cache.new_table(), self.pool.block_tokens
        assert table.prepare(len(ids)) == []
        rows, start = [], 0
        for piece in pieces:
            step = SequenceStep(
                np.asarray(ids[start : start + piece], dtype=np.uint32), start, table.blocks, start, logits="all"
            )
            rows.append(self.runner.forward([step]))
            start += piece
        assert start == len(ids)
        read = [self._read(block, min(size, len(ids) - i * size)) for i, block in enumerate(table.blocks)]
        table.release()
        return torch.cat(rows), read

    def logits(self, ids: Ids, pieces: Iterable[int]) -> torch.Tensor:
        """As `compute`, without the bytes."""
        return self.compute(ids, pieces)[0]
