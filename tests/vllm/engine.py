"""A stub of another engine: its scheduler, its blocks and a model whose KV says what it was computed from.

It batches, chunks prompts, shares hot prefixes, preempts, aborts and recomputes failed loads as vLLM's does. The state
after a token is a number made of the token and of the state before it, which is read back from the blocks: a wrong
block spoils everything after it. K and V are numbers of the state, exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import torch

from rekindle.kv.arena import KVArena
from rekindle.spec import KVLayout
from rekindle_vllm.codec import Codec
from rekindle_vllm.groups import Group, Groups
from rekindle_vllm.names import HeadShape, Scope
from rekindle_vllm.owner import RecordOwner
from rekindle_vllm.packing import BlockShape, learn
from rekindle_vllm.planner import Planner
from rekindle_vllm.ports import OwnerServer, port_to
from rekindle_vllm.requests import EngineRequest, Reuse, Scheduled
from rekindle_vllm.shares import HeadShare
from rekindle_vllm.steps import StepReport
from rekindle_vllm.transfers import Transfers
from tests.vllm.backends import backend

LAYERS, HEADS, DIM = 2, 2, 32
STATES = 16_001  # three digits of base 64 in the first dimensions of K
SHAPE = HeadShape(HEADS, DIM, DIM)
DEFAULT = Scope("default")


def next_state(state: int, token: int) -> int:
    """The state after a token."""
    return (state * 31 + token * 7 + 1) % STATES


def states_of(ids: Sequence[int]) -> np.ndarray:
    """The states after each of these tokens from the beginning, int [n]."""
    states, state = [], 0
    for token in ids:
        state = next_state(state, token)
        states.append(state)
    return np.array(states, dtype=np.int64)


def reply_of(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the model replies to a prompt."""
    state, reply = int(states_of(prompt)[-1]), []
    for _ in range(num_tokens):
        reply.append(sampled(state))
        state = next_state(state, reply[-1])
    return reply


def sampled(state: int) -> int:
    """The token that follows a state."""
    return state % 89


def values_of(states: np.ndarray, layer: int, side: int) -> torch.Tensor:
    """K (side 0) or V of tokens with these states, [heads, tokens, dim]."""
    grid = np.arange(HEADS)[:, None, None] * 11 + states[None, :, None] + np.arange(DIM)[None, None] * 3
    values = (grid + 5 * layer + 17 * side) % 61
    if side == 0:
        for digit in range(3):
            values[:, :, digit] = states // 64**digit % 64
    return torch.from_numpy(values.astype(np.float32))


def expected_rows(layout: KVLayout, ids: Sequence[int]) -> np.ndarray:
    """The payload of the last record of `ids` in native fp32 or bf16, uint8 [payload_bytes]."""
    arena = KVArena(layout, 1)
    states = states_of(ids)[-layout.block_tokens :]
    for layer in range(LAYERS):
        view = arena.layer(layer)
        view.k[0][0], view.v[0][0] = values_of(states, layer, 0), values_of(states, layer, 1)
    return np.array(arena.parts[0][0].numpy())


@dataclass(frozen=True)
class Memory:
    """The blocks of a worker: their order of values, tokens, number and dtype."""

    kind: str
    block_tokens: int
    num_blocks: int
    dtype: torch.dtype


class Worker:
    """One of several workers: its heads of all blocks, and its way to the store."""

    def __init__(
        self, owner: RecordOwner, share: HeadShare, memory: Memory, num_records: int, patience_s: float
    ) -> None:
        shape = BlockShape(memory.block_tokens, share.count, DIM, DIM)
        self.heads = slice(share.first, share.first + share.count)
        self.backends = [backend(memory.kind, shape, memory.dtype, memory.num_blocks) for _ in range(LAYERS)]
        self.values = [learn(made.cache, shape, made.write) for made in self.backends]
        codec = Codec(
            share.layout(owner.layout),
            self.values,
            [slice(0, owner.layout.block_tokens // memory.block_tokens)] * LAYERS,
            num_records=num_records,
            dtype=memory.dtype,
            device=torch.device("cpu"),
        )
        self.transfers = Transfers([codec], patience_s)
        self.port = port_to(owner.address, share)


@dataclass(eq=False)
class Request:
    """A request of the stub; `left` tokens are still to be sampled."""

    name: str
    ids: list[int]
    left: int = 1
    agent: str | None = None
    limit: int | None = None
    scope: Scope = DEFAULT
    computed: int = 0
    table: list[int] = field(default_factory=list)
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)


class StubEngine:
    """An engine with its scheduler, tensor-parallel workers and their blocks, over an owner's store."""

    def __init__(
        self,
        owner: RecordOwner,
        *,
        kind: str = "paired",
        block_tokens: int = 16,
        num_blocks: int = 64,
        budget: int = 100,
        dtype: torch.dtype = torch.bfloat16,
        num_records: int = 4,
        patience_s: float = 5.0,
        num_workers: int = 1,
    ) -> None:
        self.owner, self.block_tokens, self.budget = owner, block_tokens, budget
        self.now = 0.0  # of its planner: a second a step
        groups = Groups([Group(0, block_tokens)], owner.layout.block_tokens)
        self.planner = Planner(owner, groups, clock=lambda: self.now)
        shares = [HeadShare.of(HEADS, rank, num_workers) for rank in range(num_workers)]
        self.server = OwnerServer(owner, shares) if num_workers > 1 else None
        memory = Memory(kind, block_tokens, num_blocks, dtype)
        self.workers = [Worker(owner, share, memory, num_records, patience_s) for share in shares]
        self.threads = ThreadPoolExecutor(num_workers)
        self.free = list(range(1, num_blocks))
        self.references = dict.fromkeys(range(num_blocks), 0)
        self.hot: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.reuse: dict[str, Reuse | None] = {}
        self.replies: dict[str, list[int]] = {}
        self.recomputed = 0
        self.stalled_s = 0.0  # of saves in steps that the store had no room for

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def serve(self, name: str, ids: Sequence[int], tokens: int = 1, agent: str | None = None) -> list[int]:
        """Run one request to its end, with nothing else to do; return its reply."""
        self.add(Request(name, list(ids), tokens, agent=agent))
        self.drain()
        return self.replies[name]

    def drain(self) -> None:
        """Run until nothing is left to do."""
        steps = 0
        while self.waiting or self.running:
            self.step()
            steps += 1
            assert steps < 10_000, "the engine makes no progress"

    def step(self) -> None:
        """Schedule, execute and update once."""
        self.now += 1
        work = self._schedule()
        tables = {request.name: (request.table,) for request, _ in work}
        plan = self.planner.plan([each for _, each in work], tables.__getitem__)
        list(self.threads.map(lambda worker: worker.transfers.load(plan, worker.port), self.workers))
        for _ in work:  # as in a batch: what one computes, another may read
            for request, each in work:
                self._compute(request, each.computed, each.tokens)
        list(self.threads.map(lambda worker: worker.transfers.save(plan, worker.port), self.workers))
        failed = set.union(*(worker.transfers.take_failed_blocks() for worker in self.workers))
        affected = self._invalidate(failed, {r.name: e.tokens for r, e in work})
        for request, _ in work:
            if request.name not in affected and request.computed == len(request.ids):
                self._sample(request)
        report = reduce(StepReport.merged, (worker.transfers.take_report() for worker in self.workers))
        self.stalled_s += report.stalled_s
        self.planner.report(report)
        self.planner.check()

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away; it begins anew later."""
        self.running.remove(request)
        self._release(request)
        request.computed, request.table = 0, []
        self.waiting.insert(0, request)

    def abort(self, request: Request) -> None:
        """End a request before its reply is complete."""
        (self.running if request in self.running else self.waiting).remove(request)
        self._end(request)

    def close(self) -> None:
        """End the workers' connections and the server."""
        for worker in self.workers:
            worker.port.close()
        if self.server is not None:
            self.server.close()

    def forget_hot(self) -> None:
        """Forget all shared prefixes, as after a restart."""
        self.hot.clear()

    def _schedule(self) -> list[tuple[Request, Scheduled]]:
        budget, work = self.budget, []
        for request in list(self.running):
            tokens = min(len(request.ids) - request.computed, budget)
            if request not in self.running or not tokens:
                continue
            while not self._allocate(request, request.computed + tokens):
                self.preempt(self.running[-1])
                if request not in self.running:
                    break
            if request in self.running:
                work.append((request, Scheduled(request.name, request.computed, tokens)))
                budget -= tokens
        work = [(request, each) for request, each in work if request in self.running]
        while self.waiting and budget:
            admitted = self._admit(self.waiting[0], budget)
            if admitted is None:
                break
            work.append(admitted)
            budget -= admitted[1].tokens
        for request, each in work:
            request.computed += each.tokens
        return work

    def _admit(self, request: Request, budget: int) -> tuple[Request, Scheduled] | None:
        hot = self._hot_blocks(request)
        computed = len(hot) * self.block_tokens
        known = EngineRequest(request.name, request.ids, request.scope, request.agent, request.limit)
        external = self.planner.match(known, computed)
        tokens = min(len(request.ids) - computed - external, budget)
        self._hold(hot)
        request.table = list(hot)
        if not self._allocate(request, computed + external + tokens):
            self._release(request)
            request.table = []
            assert self.running, "a request does not fit into the engine at all"
            return None
        self.planner.promise(request.name, external)
        self.waiting.remove(request)
        self.running.append(request)
        request.computed = computed + external
        return request, Scheduled(request.name, request.computed, tokens, begins=True)

    def _hot_blocks(self, request: Request) -> list[int]:
        found = []
        for end in range(self.block_tokens, len(request.ids), self.block_tokens):
            block = self.hot.get((request.scope.cache_salt, tuple(request.ids[:end])))
            if block is None:
                break
            found.append(block)
        return found

    def _hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] += 1
            if block in self.free:
                self.free.remove(block)

    def _allocate(self, request: Request, tokens: int) -> bool:
        needed = -(-tokens // self.block_tokens) - len(request.table)
        if needed > len(self.free):
            return False
        for _ in range(needed):
            block = self.free.pop(0)
            self.hot = {key: held for key, held in self.hot.items() if held != block}
            self.references[block] = 1
            request.table.append(block)
        for number in range(min(tokens, len(request.ids)) // self.block_tokens):
            key = request.scope.cache_salt, tuple(request.ids[: (number + 1) * self.block_tokens])
            self.hot.setdefault(key, request.table[number])
        return True

    def _release(self, request: Request) -> None:
        for block in reversed(request.table):
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)

    def _compute(self, request: Request, computed: int, tokens: int) -> None:
        """Write K and V of tokens, the state before them read from the blocks."""
        state, states = self._state(request, computed - 1), []
        for token in request.ids[computed : computed + tokens]:
            state = next_state(state, token)
            states.append(state)
        for worker in self.workers:
            self._write(worker, request, computed, np.array(states, dtype=np.int64))

    def _write(self, worker: Worker, request: Request, computed: int, states: np.ndarray) -> None:
        end_of_all = computed + len(states)
        for layer, values in enumerate(worker.values):
            for side, where in enumerate((values.k, values.v)):
                new = values_of(states, layer, side)[worker.heads]
                for block in range(computed // self.block_tokens, -(-end_of_all // self.block_tokens)):
                    first = max(computed, block * self.block_tokens)
                    end = min(end_of_all, (block + 1) * self.block_tokens)
                    at = torch.tensor([request.table[block]])
                    held = where.read(at)
                    inside = slice(first - block * self.block_tokens, end - block * self.block_tokens)
                    held[0, :, inside] = new[:, first - computed : end - computed].to(held.dtype)
                    where.write(at, held)

    def _state(self, request: Request, position: int) -> int:
        """The state after a token, as its block has it."""
        if position < 0:
            return 0
        block = torch.tensor([request.table[position // self.block_tokens]])
        digits = self.workers[-1].values[0].k.read(block)[0, 0, position % self.block_tokens, :3].tolist()
        return int(sum(digit * 64**number for number, digit in enumerate(digits)))

    def _invalidate(self, failed: set[int], tokens: dict[str, int]) -> set[str]:
        """Take back what was counted as computed of requests with failed blocks, as vLLM does; return their names."""
        affected, marked = set(), set()
        for request in self.running if failed else ():
            before = request.computed - tokens.get(request.name, 0)
            blocks = request.table[: -(-before // self.block_tokens)]
            numbers = [number for number, block in enumerate(blocks) if block in failed]
            own = [number for number in numbers if request.table[number] not in marked]
            marked.update(request.table[number] for number in own)
            if numbers:
                affected.add(request.name)
                request.computed = own[0] * self.block_tokens if own else before
                self.recomputed += before - request.computed
        return affected

    def _sample(self, request: Request) -> None:
        request.ids.append(sampled(self._state(request, len(request.ids) - 1)))
        request.left -= 1
        if not request.left:
            self.running.remove(request)
            self._end(request)

    def _end(self, request: Request) -> None:
        self.reuse[request.name] = self.planner.finish(request.name)
        self.replies[request.name] = request.ids[request.prompt :]
        self._release(request)
