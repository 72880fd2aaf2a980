"""A stub of another engine with several KV cache groups: full attention, sliding windows, recurrent states.

It schedules as vLLM's does: requests wait for what is loaded for them, blocks before a window are given back, states
are at ends of blocks where prefill chunks end. The model is that of `engine`, its state in a block of the state group
if there is one. Whatever a step reads is compared with what its tokens have: a difference spoils the reply.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, reduce
from math import lcm

import numpy as np
import torch
from torch import Tensor

from rekindle.kv.arena import KVArena
from rekindle.parts import FULL, STATE, Part, WindowPart
from rekindle.spec import KVLayout
from rekindle_vllm.codec import Codec, PartCodec, alone
from rekindle_vllm.groups import NULL, Group, Groups
from rekindle_vllm.names import HeadShape, RecordFormat, StateShape, record_layout
from rekindle_vllm.owner import RecordOwner
from rekindle_vllm.packing import BlockShape, learn
from rekindle_vllm.planner import Planner
from rekindle_vllm.ports import OwnerServer, port_to
from rekindle_vllm.requests import EngineRequest, Reuse, Scheduled
from rekindle_vllm.shares import HeadShare
from rekindle_vllm.states import StateCodec
from rekindle_vllm.steps import StepPlan, StepReport
from rekindle_vllm.transfers import Transfers
from tests.vllm.backends import Backend, backend
from tests.vllm.engine import DEFAULT, DIM, HEADS, STATES, next_state, sampled, states_of, values_of

STATE_TENSORS = (((2, 3), torch.float32), ((5,), torch.bfloat16))


def window_of(kind: Part) -> int | None:
    """Tokens of a window; None of other parts."""
    return kind.window if isinstance(kind, WindowPart) else None


@dataclass(frozen=True)
class Kind:
    """An engine's groups, each the kind of its part and its block's tokens.

    A group of states has one layer, one of full attention two, and each keeps K and V of all heads.
    """

    groups: tuple[tuple[Part, int], ...]
    record: int = 64

    @property
    def layers(self) -> list[tuple[Part, int]]:
        """Kind and group of each layer."""
        return [(kind, number) for number, (kind, _) in enumerate(self.groups) for _ in range(2 if kind == FULL else 1)]

    def layout(self, record_format: RecordFormat = "native") -> KVLayout:
        """The layout of its records."""
        shapes = [
            StateShape(STATE_TENSORS) if kind == STATE else HeadShape(HEADS, DIM, DIM, window_of(kind))
            for kind, _ in self.layers
        ]
        return record_layout(shapes, torch.bfloat16, record_format, self.record)

    def made(self) -> Groups:
        """Its groups, by the parts of its layout."""
        parts = {part.kind: part.index for part in self.layout().parts}
        return Groups([Group(parts[kind], tokens, kind) for kind, tokens in self.groups], self.record)


@cache
def attention_values(layer: int) -> Tensor:
    """K and V of a token by the state after it: [states, heads, K and V]."""
    states = np.arange(STATES)
    sides = [values_of(states, layer, side).transpose(0, 1) for side in (0, 1)]
    return torch.cat(sides, dim=2).to(torch.bfloat16)


def recurrent_values(layer: int, state: int) -> list[Tensor]:
    """The tensors of a recurrent layer after a state; the last one begins with its digits."""
    shape, dtype = STATE_TENSORS[0]
    first = (torch.arange(6, dtype=dtype) * (layer + 1) + state / 8).reshape(shape)
    digits = [state // 64**number % 64 for number in range(3)]
    return [first, torch.tensor([*digits, layer, state % 61], dtype=STATE_TENSORS[1][1])]


def number_of(digits: Sequence[float]) -> int:
    """The state that digits stand for; garbage stands for some other one."""
    return int(sum(digit * 64**number for number, digit in enumerate(digits))) % STATES


def expected_part(kind: Kind, part: int, ids: Sequence[int]) -> np.ndarray:
    """The payload of a part of the last record of `ids` in native bf16, uint8 [payload_bytes]."""
    layout, states = kind.layout(), states_of(ids)
    layers = [index for index, (own, _) in enumerate(kind.layers) if own == layout.parts[part].kind]
    if layout.parts[part].kind == STATE:
        row = np.zeros(layout.parts[part].payload_bytes, dtype=np.uint8)
        for index, sections in zip(layers, layout.parts[part].state_sections, strict=True):
            for section, value in zip(sections, recurrent_values(index, int(states[-1])), strict=True):
                row[section.offset :][: section.num_bytes] = value.reshape(-1).view(torch.uint8).numpy()
        return row
    arena = KVArena(alone(layout, layout.parts[part]), 1)
    for number, index in enumerate(layers):
        view, values = arena.layer(number), attention_values(index)[states[-layout.block_tokens :]].transpose(0, 1)
        view.k[0][0], view.v[0][0] = values[..., :DIM], values[..., DIM:]
    return np.array(arena.parts[0][0].numpy())


class HybridWorker:
    """A worker's heads of all blocks of all layers, and its way to the store."""

    def __init__(
        self,
        owner: RecordOwner,
        share: HeadShare,
        kind: Kind,
        *,
        num_blocks: int,
        num_records: int,
        patience_s: float,
    ) -> None:
        self.heads, self.groups = slice(share.first, share.first + share.count), kind.made()
        self.layers = kind.layers
        self.attention: dict[int, Backend] = {}
        self.states: dict[int, list[Tensor]] = {}
        for index, (part, group) in enumerate(kind.layers):
            if part == STATE:
                self.states[index] = [torch.zeros(num_blocks, *shape, dtype=dtype) for shape, dtype in STATE_TENSORS]
            else:
                shape = BlockShape(self.groups.block_tokens(group), share.count, DIM, DIM)
                self.attention[index] = backend("heads first", shape, torch.bfloat16, num_blocks)
        layout = share.layout(owner.layout)
        codecs = [self._codec(layout, part.index, kind, num_records) for part in layout.parts]
        self.transfers = Transfers(codecs, patience_s)
        self.port = port_to(owner.address, share)

    def _codec(self, layout: KVLayout, part: int, kind: Kind, num_records: int) -> PartCodec:
        wanted, device = layout.parts[part].kind, torch.device("cpu")
        layers = [(index, group) for index, (own, group) in enumerate(kind.layers) if own == wanted]
        columns = [self.groups.columns(group) for _, group in layers]
        if wanted == STATE:
            tensors = [self.states[index] for index, _ in layers]
            return StateCodec(layout, tensors, columns, num_records=num_records, device=device)
        values = [
            learn(made.cache, made.shape, made.write, pieces=self.groups.pieces_per_block(group))
            for index, group in layers
            for made in [self.attention[index]]
        ]
        own = alone(layout, layout.parts[part])
        return Codec(own, values, columns, num_records=num_records, dtype=torch.bfloat16, device=device)

    def overwrite(self, group: int, blocks: Sequence[int]) -> None:
        """Put into blocks what no token has: what is not loaded into them is not there by chance."""
        for index, (_, own) in enumerate(self.layers):
            if own == group:
                for tensor in self.states[index] if index in self.states else [self.attention[index].cache]:
                    tensor[blocks] = -1


class Pool:
    """The engine's blocks: who refers to each, and which text it holds; those that nobody refers to are taken anew."""

    def __init__(self, num_blocks: int) -> None:
        self.free = OrderedDict.fromkeys(range(1, num_blocks))
        self.references = [0] * num_blocks
        self.hot: dict[object, int] = {}
        self.texts: dict[int, object] = {}

    def take(self) -> int:
        """A block without a text."""
        block, _ = self.free.popitem(last=False)
        self.references[block] = 1
        if block in self.texts:
            del self.hot[self.texts.pop(block)]
        return block

    def hold(self, block: int) -> None:
        """Refer to a block once more."""
        if block != NULL:
            self.references[block] += 1
            self.free.pop(block, None)

    def release(self, block: int) -> None:
        """Refer to it once less."""
        if block != NULL:
            self.references[block] -= 1
            if not self.references[block]:
                self.free[block] = None

    def publish(self, text: object, block: int) -> None:
        """Let others find what a block holds, unless they find it in another one."""
        if block != NULL and text not in self.hot and block not in self.texts:
            self.hot[text], self.texts[block] = block, text


@dataclass(eq=False)
class HybridRequest:
    """A request of the stub; `left` tokens are still to be sampled, `truth` are the states after its tokens."""

    name: str
    ids: list[int]
    left: int = 1
    agent: str | None = None
    limit: int | None = None
    computed: int = 0
    tables: tuple[list[int], ...] = ()
    truth: list[int] = field(default_factory=list)
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)

    def states(self) -> np.ndarray:
        """The states after its tokens, int [n]."""
        for token in self.ids[len(self.truth) :]:
            self.truth.append(next_state(self.truth[-1] if self.truth else 0, token))
        return np.array(self.truth, dtype=np.int64)


class HybridEngine:
    """An engine with these groups, its scheduler and workers, over an owner's store.

    `begin` schedules a step and `end` executes it; between them a request may be aborted that waits for its loads.
    """

    def __init__(
        self,
        owner: RecordOwner,
        kind: Kind,
        *,
        num_blocks: int = 200,
        budget: int = 128,
        num_records: int = 4,
        patience_s: float = 5.0,
        num_workers: int = 1,
    ) -> None:
        self.owner, self.kind, self.budget = owner, kind, budget
        self.now = 0.0  # of its planner: a second a step
        self.groups = kind.made()
        self.planner = Planner(owner, self.groups, clock=lambda: self.now)
        shares = [HeadShare.of(HEADS, rank, num_workers) for rank in range(num_workers)]
        self.server = OwnerServer(owner, shares) if num_workers > 1 else None
        self.workers = [
            HybridWorker(owner, share, kind, num_blocks=num_blocks, num_records=num_records, patience_s=patience_s)
            for share in shares
        ]
        self.threads = ThreadPoolExecutor(num_workers)
        self.pool = Pool(num_blocks)
        self.align = lcm(*(tokens for _, tokens in kind.groups))
        self.state_tokens = max((tokens for part, tokens in kind.groups if part == STATE), default=0)
        self.waiting: list[HybridRequest] = []
        self.running: list[HybridRequest] = []
        self.loading: dict[str, HybridRequest] = {}
        self.aborted: dict[str, HybridRequest] = {}  # while they waited: their blocks are still written
        self.fresh: set[int] = set()  # states that this step computes
        self.work: list[tuple[HybridRequest, Scheduled]] = []
        self.plan = StepPlan(owner.address)
        self.reuse: dict[str, Reuse | None] = {}
        self.replies: dict[str, list[int]] = {}
        self.spoilt: list[str] = []

    def add(self, request: HybridRequest) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def serve(self, name: str, ids: Sequence[int], tokens: int = 1, agent: str | None = None) -> list[int]:
        """Run one request to its end, with nothing else to do; return its reply."""
        self.add(HybridRequest(name, list(ids), tokens, agent=agent))
        self.drain()
        return self.replies[name]

    def drain(self) -> None:
        """Run until nothing is left to do."""
        steps = 0
        while self.is_busy:
            self.step()
            steps += 1
            assert steps < 3000, "the engine makes no progress"

    @property
    def is_busy(self) -> bool:
        """Whether a request has not ended."""
        return bool(self.waiting or self.running or self.loading)

    def step(self) -> None:
        """Schedule, execute and update once."""
        self.begin()
        self.end()

    def begin(self) -> None:
        """Schedule a step."""
        self.now += 1
        self.fresh = set()
        self.work = self._schedule()
        tables = {request.name: request.tables for request, _ in self.work}
        self.plan = self.planner.plan([each for _, each in self.work], tables.__getitem__)

    def end(self) -> None:
        """Execute it and take its results."""
        list(self.threads.map(lambda worker: worker.transfers.load(self.plan, worker.port), self.workers))
        for request, each in self.work:
            self._compute(request, each)
        list(self.threads.map(lambda worker: worker.transfers.save(self.plan, worker.port), self.workers))
        taken = [worker.transfers.take_arrived() for worker in self.workers]
        arrived, failed = set.intersection(*(each for each, _ in taken)), set.union(*(each for _, each in taken))
        assert all(each == arrived for each, _ in taken), "workers differ in what has arrived"
        self._arrive(arrived, failed)
        for request, each in self.work:
            request.computed = each.computed + each.tokens
            if request.computed == len(request.ids):
                self._sample(request)
        assert not any(worker.transfers.take_failed_blocks() for worker in self.workers)
        self.planner.report(reduce(StepReport.merged, (worker.transfers.take_report() for worker in self.workers)))
        self.planner.check()

    def preempt(self, request: HybridRequest) -> None:
        """Take a running request's blocks away; it begins anew later."""
        self.running.remove(request)
        self._release(request)
        self.waiting.insert(0, request)

    def abort(self, request: HybridRequest) -> None:
        """End a request before its reply is complete; blocks that are loaded stay its own until they have come."""
        if request.name in self.loading:
            self.aborted[request.name] = self.loading.pop(request.name)
            self._finish(request)
        else:
            (self.running if request in self.running else self.waiting).remove(request)
            self._finish(request)
            self._release(request)

    def forget_hot(self) -> None:
        """Forget all shared prefixes, as after a restart."""
        self.pool.hot.clear()
        self.pool.texts.clear()

    def close(self) -> None:
        """End the workers' connections and the server."""
        for worker in self.workers:
            worker.port.close()
        if self.server is not None:
            self.server.close()

    def check_blocks(self) -> None:
        """Assert that every reference is a request's, once nothing is being executed."""
        held = [0] * len(self.pool.references)
        for request in (*self.waiting, *self.running, *self.loading.values(), *self.aborted.values()):
            for block in (block for table in request.tables for block in table if block != NULL):
                held[block] += 1
        assert held == self.pool.references, "blocks are held by nobody"

    # Scheduling.

    def _schedule(self) -> list[tuple[HybridRequest, Scheduled]]:
        budget, work, has_room = self.budget, list[tuple[HybridRequest, Scheduled]](), True
        for request in list(self.running):
            tokens = self._split(request, min(len(request.ids) - request.computed, budget))
            while tokens and request in self.running and not self._allocate(request, tokens):
                self.preempt(self.running[-1])
            if tokens and request in self.running:
                work.append((request, self._scheduled(request, tokens)))
                budget -= tokens
        for request in list(self.waiting):
            if has_room or request.computed:  # what was loaded for holds blocks that others wait for
                admitted = self._admit(request, budget)
                has_room = has_room and admitted != "no room"
                if isinstance(admitted, Scheduled):
                    work.append((request, admitted))
                    budget -= admitted.tokens
        return work

    def _admit(self, request: HybridRequest, budget: int) -> Scheduled | str:
        """Begin a request, or let it wait for what is loaded for it."""
        has_loaded = request.computed > 0
        if not has_loaded:
            hot, found = self._hit(request)
            known = EngineRequest(request.name, request.ids, DEFAULT, request.agent, request.limit)
            external = self.planner.match(known, hot)
            self._take_over(request, found, hot + external)
            if external:
                return self._begin_load(request, external)
        is_early = not has_loaded and any(block in self.fresh for table in request.tables for block in table)
        tokens = 0 if is_early else self._split(request, min(len(request.ids) - request.computed, budget))
        if not tokens or not self._allocate(request, tokens):
            if not has_loaded:
                self._release(request)
            return "no room"
        self.planner.promise(request.name, 0, request.tables)
        self.waiting.remove(request)
        self.running.append(request)
        return self._scheduled(request, tokens, begins=True)

    def _begin_load(self, request: HybridRequest, external: int) -> str:
        """Give a request blocks for what is loaded, if all others that hold blocks can still be completed."""
        new = [
            -(-request.computed // size) - len(table)
            for (_, size), table in zip(self.kind.groups, request.tables, strict=True)
        ]
        holding = [*self.loading.values(), *(each for each in self.waiting if each.computed and each is not request)]
        if len(self.pool.free) - sum(map(self._rest, holding)) < max(sum(new), self._rest(request)):
            self._release(request)
            return "no room"
        for group, count in enumerate(new):
            taken = [self.pool.take() for _ in range(count)]
            request.tables[group].extend(taken)
            for worker in self.workers:
                worker.overwrite(group, taken)
        self.planner.promise(request.name, external, request.tables)
        self.waiting.remove(request)
        self.loading[request.name] = request
        return "waits"

    def _rest(self, request: HybridRequest) -> int:
        """Blocks that a request may need in addition to those that it has."""
        length = len(request.ids) + request.left
        most: dict[Part, int] = {FULL: length, STATE: 3 * self.state_tokens}
        sizes = [
            -(-min(length, most.get(kind, (window_of(kind) or 0) + self.budget) + size) // size)
            for kind, size in self.kind.groups
        ]
        return max(0, sum(sizes) - sum(block != NULL for table in request.tables for block in table))

    def _arrive(self, arrived: set[str], failed: set[str]) -> None:
        for name in arrived:
            if name in self.aborted:
                self._release(self.aborted.pop(name))
                continue
            request = self.loading.pop(name)
            if name in failed:
                self._release(request)
            else:
                self._publish(request, 0, request.computed)
                self._publish_state(request, request.computed)
            self.waiting.insert(0, request)

    def _split(self, request: HybridRequest, tokens: int) -> int:
        """End a chunk of a prompt where a block of states does."""
        size, start, end = self.state_tokens, request.computed, request.computed + tokens
        prefill_end = max(request.prompt, len(request.ids) - 1)
        if not size or start >= prefill_end:
            return tokens
        if end < prefill_end and (end // size * size > start or size <= self.budget):
            end = end // size * size
        stops = ((start // size + 1) * size if start % size else 0, (len(request.ids) - 1) // size * size)
        return max(0, min((stop for stop in stops if start < stop < end), default=end) - start)

    def _skipped(self, group: int, computed: int) -> int:
        """Blocks of a group before those that are needed after so many tokens."""
        kind, size = self.kind.groups[group]
        if kind == FULL:
            return 0
        return max(0, computed - (kind.window - 1 if isinstance(kind, WindowPart) else 1)) // size

    def _allocate(self, request: HybridRequest, tokens: int) -> bool:
        """Give passed blocks back and take those for the next tokens; False if there are too few."""
        end, new = request.computed + tokens, list[int]()
        for group, table in enumerate(request.tables):
            _, size = self.kind.groups[group]
            for number in reversed(range(min(self._skipped(group, request.computed), len(table)))):
                self.pool.release(table[number])
                table[number] = NULL
            new.append(max(0, -(-end // size) - len(table)))
        is_state = [kind == STATE for kind, _ in self.kind.groups]
        if sum(min(count, 1) if one else count for count, one in zip(new, is_state, strict=True)) > len(self.pool.free):
            return False
        for table, count, one in zip(request.tables, new, is_state, strict=True):
            passed = count - 1 if one and count else 0
            table += [NULL] * passed + [self.pool.take() for _ in range(count - passed)]
        self._publish(request, request.computed, end)
        return True

    def _scheduled(self, request: HybridRequest, tokens: int, *, begins: bool = False) -> Scheduled:
        """A request's part in the step, with the state that the engine keeps after it: at the prompt's last border."""
        end, states = request.computed + tokens, list[tuple[int, int, int]]()
        if self.state_tokens and end == (request.prompt - 1) // self.state_tokens * self.state_tokens:
            states = self._publish_state(request, end)
            self.fresh.update(block for _, block, _ in states)
        return Scheduled(request.name, request.computed, tokens, begins, states)

    # Blocks that are shared.

    def _hit(self, request: HybridRequest) -> tuple[int, list[list[int]]]:
        """The tokens whose blocks of all groups are hot, and those blocks."""
        for end in range((len(request.ids) - 1) // self.align * self.align, 0, -self.align):
            found = [self._hot(request, group, end) for group in range(len(self.groups))]
            if all(table is not None for table in found):
                return end, [table for table in found if table is not None]
        return 0, [[] for _ in self.kind.groups]

    def _hot(self, request: HybridRequest, group: int, end: int) -> list[int] | None:
        size, skipped = self.kind.groups[group][1], self._skipped(group, end)
        ends = range((skipped + 1) * size, end + 1, size)
        blocks = [self.pool.hot.get((group, *request.ids[:at])) for at in ends]
        return None if None in blocks else [NULL] * skipped + [block for block in blocks if block is not None]

    def _take_over(self, request: HybridRequest, found: Sequence[list[int]], computed: int) -> None:
        """Refer to hot blocks, as far as they are needed after the `computed` tokens."""
        request.computed = computed
        skipped = [self._skipped(group, computed) for group in range(len(self.groups))]
        request.tables = tuple([NULL] * most + table[most:] for most, table in zip(skipped, found, strict=True))
        for block in (block for table in request.tables for block in table):
            self.pool.hold(block)

    def _publish(self, request: HybridRequest, start: int, end: int) -> None:
        """Let others find the blocks of attention that are full after `end` tokens."""
        for group, (kind, size) in enumerate(self.kind.groups):
            for number in range(start // size, end // size if kind != STATE else 0):
                self.pool.publish((group, *request.ids[: (number + 1) * size]), request.tables[group][number])

    def _publish_state(self, request: HybridRequest, end: int) -> list[tuple[int, int, int]]:
        """Let others find the states after `end` tokens; return them as the engine offers them."""
        offered = []
        for group, (kind, _) in enumerate(self.kind.groups):
            if kind == STATE:
                self.pool.publish((group, *request.ids[:end]), request.tables[group][-1])
                offered.append((group, request.tables[group][-1], end))
        return offered

    def _release(self, request: HybridRequest) -> None:
        for table in request.tables:
            for block in reversed(table):
                self.pool.release(block)
        request.tables, request.computed = (), 0

    # The model.

    def _compute(self, request: HybridRequest, each: Scheduled) -> None:
        """Write K and V of a step's tokens and the state after them, from what its blocks have of those before."""
        before, states = each.computed, request.states()
        wrong = self._wrong(request, states, before, whole=each.begins)
        state = self._state(request, before)
        if wrong:
            self.spoilt.append(f"{request.name} after {before} tokens: {wrong}")
            state = (state + 1) % STATES
        found = []
        for token in request.ids[before : before + each.tokens]:
            state = next_state(state, token)
            found.append(state)
        positions = np.arange(before, before + each.tokens)
        for worker in self.workers:
            for index, made in worker.attention.items():
                blocks, offsets = self._places(request, index, positions)
                made.cache[blocks, :, offsets] = attention_values(index)[found][:, worker.heads]
            for index, tensors in worker.states.items():
                block = request.tables[self.kind.layers[index][1]][-1]
                for tensor, value in zip(tensors, recurrent_values(index, state), strict=True):
                    tensor[block] = value

    def _places(self, request: HybridRequest, layer: int, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        group = self.kind.layers[layer][1]
        size = self.kind.groups[group][1]
        table = np.array(request.tables[group])
        return torch.from_numpy(table[positions // size]), torch.from_numpy(positions % size)

    def _wrong(self, request: HybridRequest, states: np.ndarray, before: int, *, whole: bool) -> str:
        """What the next token would read that is not what the tokens before it have; empty if nothing is."""
        for worker in self.workers if before else ():
            for index, made in worker.attention.items():
                window = window_of(self.kind.layers[index][0])
                first = max(0, before - window + 1) if window is not None else 0
                step = 1 if whole or window is not None else 1 + before // 32
                positions = np.arange(before - 1, first - 1, -step)
                blocks, offsets = self._places(request, index, positions)
                known = attention_values(index)[states[positions]][:, worker.heads]
                if NULL in blocks or not torch.equal(made.cache[blocks, :, offsets], known):
                    return f"layer {index} has other keys or values, or none"
            for index, tensors in worker.states.items():
                block = self._state_block(request, index, before)
                for tensor, value in zip(tensors, recurrent_values(index, int(states[before - 1])), strict=True):
                    if block == NULL or not torch.equal(tensor[block], value):
                        return f"layer {index} has another state, or none"
        return ""

    def _state_block(self, request: HybridRequest, layer: int, computed: int) -> int:
        return request.tables[self.kind.layers[layer][1]][(computed - 1) // self.state_tokens]

    def _state(self, request: HybridRequest, computed: int) -> int:
        """The state after `computed` tokens: of a recurrent layer, or what full attention has of the last of them."""
        worker = self.workers[-1]
        if not computed:
            return 0
        for index, tensors in worker.states.items():
            return number_of(tensors[-1][self._state_block(request, index, computed)][:3].tolist())
        blocks, offsets = self._places(request, 0, np.array([computed - 1]))
        return number_of(worker.attention[0].cache[blocks, :, offsets][0, 0, :3].tolist())

    def _sample(self, request: HybridRequest) -> None:
        request.ids.append(sampled(self._state(request, request.computed)))
        request.left -= 1
        if not request.left:
            self.running.remove(request)
            self._finish(request)
            self._release(request)

    def _finish(self, request: HybridRequest) -> None:
        self.reuse[request.name] = self.planner.finish(request.name)
        self.replies[request.name] = request.ids[request.prompt :]
