"""The disk budget against a naive model that looks at every block each time: who leaves, what stays, what is told.

Turns of several agents, abandoned prompts, uses, pins, deletions, purges, passing time and reopening, all on a disk of
a few blocks, without windows (`test_covers` has them). The model searches all blocks for the one to evict; the store
must have evicted the same ones.
"""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from rekindle.agent_ids import AgentKind, kind_of, recovered
from rekindle.store.commands import Delete, Pin, Purge
from rekindle.store.files.records import MAGIC, RecordFormat
from rekindle.store.rows.retention import RUNNING_S
from tests.store.chains import (
    FINGERPRINT,
    PLAIN_LAYOUT,
    SIZE,
    one_batch,
    open_store,
    warm_tokens,
)
from tests.store.machine import StoreMachine

AGENTS = st.sampled_from(["ann", "bob", f"{AgentKind.CONVERSATION.value}x", recovered(1), "cat"])
RUNS = st.lists(st.integers(0, 2), max_size=6)
BUDGET = 7
BLOCK_BYTES = RecordFormat.of(PLAIN_LAYOUT, 0).record_bytes
TICK_S = 100.0
Key = tuple[str, int]


class NaiveStore:
    """Blocks by name: [parent or None, last use]; branches: [ids of its blocks, tokens, last use]."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, list] = {}
        self.branches: dict[Key, list] = {}
        self.pins: dict[str, float] = {}
        self.lost: dict[Key, int] = {}

    def heads(self, chain_of) -> dict[bytes, list[Key]]:
        found: dict[bytes, list[Key]] = {}
        for key, (ids, _, _) in self.branches.items():
            found.setdefault(chain_of(ids).head, []).append(key)
        return found

    def needed(self, chain_of, keys) -> set[bytes]:
        return {block.identity.hash for key in keys for block in chain_of(self.branches[key][0]).blocks}

    def rank(self, name: bytes, standing: list[Key], now: float) -> tuple[int, float]:
        if standing:
            return max((1 if kind_of(key[0]).is_temporary else 2, self.branches[key][2]) for key in standing)
        last_use = self.blocks[name][1]
        return (2 if now - last_use <= RUNNING_S else 0), last_use

    def make_room(self, num_blocks: int, keep: set[bytes], now: float, chain_of) -> int:
        while len(self.blocks) + num_blocks > BUDGET:
            parents, heads = {parent for parent, _ in self.blocks.values()}, self.heads(chain_of)
            pinned = {
                name for name, keys in heads.items() if any(self.pins.get(key[0], -1.0) >= now > 0 for key in keys)
            }
            may_go = set(self.blocks) - parents - keep - pinned
            if not may_go:
                break
            self.evict(min(may_go, key=lambda name: self.rank(name, heads.get(name, []), now)), heads, chain_of)
        return min(num_blocks, BUDGET - len(self.blocks))

    def evict(self, name: bytes, heads: dict[bytes, list[Key]], chain_of) -> None:
        del self.blocks[name]
        for key in heads.get(name, []):
            ids, num_tokens, _ = self.branches[key]
            left = (num_tokens - 1) // SIZE * SIZE
            self.branches[key][:2] = [ids[:left], left]
            self.lost[key] = left
            if not left:
                self.forget(key)

    def forget(self, key: Key) -> None:
        del self.branches[key]
        if not any(other[0] == key[0] for other in self.branches):
            self.pins.pop(key[0], None)

    def release(self, name: bytes | None, chain_of) -> None:
        while name is not None and name in self.blocks:
            if name in self.heads(chain_of) or name in {parent for parent, _ in self.blocks.values()}:
                return
            name = self.blocks.pop(name)[0]


class BudgetMachine(StoreMachine):
    """Every rule is one batch of the writer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = NaiveStore()
        self.now = 1000.0
        self.told: dict[Key, int] = {}

    @initialize()
    def open(self) -> None:
        self.store = open_store(
            self.directory,
            layout=PLAIN_LAYOUT,
            shard_bytes=1 << 14,
            disk_bytes=BUDGET * BLOCK_BYTES + 5,
            clock=lambda: self.now,
            on_lost=lambda namespace, agent, branch, left: self.told.__setitem__((agent, branch), left),
        )
        self.store.start()

    def batch(self, ids: list[int], key: Key | None, num_tokens: int | None = None) -> None:
        """Stage a chain and, with a key, move that branch to its end; the same in the model."""
        self.now += TICK_S
        chain, model = self.chain(ids), self.model
        num_tokens = len(ids) if num_tokens is None else num_tokens
        with one_batch(self.store):
            for block in chain.blocks:
                assert self.store.stage(block)
            if key is not None:
                self.store.save_turn(chain.record(key[0], key[1], num_tokens=num_tokens, last_use=self.now))
        old = self.chain(model.branches[key][0]).head if key in model.branches else None
        wanted = [block for block in chain.blocks if block.identity.hash not in model.blocks]
        keep = {block.identity.hash for block in chain.blocks} | {chain.head} | ({old} if key is not None else set())
        room = model.make_room(len(wanted), keep, self.now, self.chain)
        for block in wanted[:room]:
            model.blocks[block.identity.hash] = [
                block.identity.parent if block.identity.parent != block.identity.root else None,
                self.now,
            ]
        if key is not None and (chain.head in model.blocks or not ids):
            model.branches[key] = [ids, num_tokens, self.now]
            model.lost.pop(key, None)
            self.told.pop(key, None)
            model.release(old, self.chain)

    @rule(agent=AGENTS, branch=st.integers(0, 1), runs=RUNS, tail=st.integers(0, SIZE - 1))
    def turn(self, agent: str, branch: int, runs: list[int], tail: int) -> None:
        self.batch([number for run in runs for number in [run] * SIZE] + [7] * tail, (agent, branch))

    @rule(runs=RUNS)
    def abandoned_prompt(self, runs: list[int]) -> None:
        self.batch([number for run in runs for number in [run] * SIZE], None)

    @precondition(lambda self: self.model.branches)
    @rule(data=st.data(), agent=AGENTS, more=st.integers(0, 40))
    def continue_or_fork(self, data: st.DataObject, agent: str, more: int) -> None:
        ids, num_tokens, _ = self.model.branches[data.draw(st.sampled_from(sorted(self.model.branches)))]
        self.batch(ids[:num_tokens] + [1] * more, (agent, 0))

    @precondition(lambda self: self.model.branches)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        self.now += TICK_S
        key = data.draw(st.sampled_from(sorted(self.model.branches)))
        self.store.touch("default", *key, self.now)
        self.model.branches[key][2] = self.now

    @rule(agent=AGENTS, until=st.sampled_from([math.inf, 0.0, 3 * TICK_S, 8 * TICK_S]))
    def pin(self, agent: str, until: float) -> None:
        until = until and until + self.now
        known = any(key[0] == agent for key in self.model.branches)
        assert self.store.submit(Pin("default", agent, until)).result(10) == known
        if known:
            self.model.pins[agent] = until

    @rule(agent=AGENTS)
    def delete(self, agent: str) -> None:
        self.store.submit(Delete("default", agent)).result(10)
        self.drop(agent)

    def drop(self, agent: str) -> None:
        keys = [key for key in self.model.branches if key[0] == agent]
        heads = [self.chain(self.model.branches[key][0]).head for key in keys]
        for key in keys:
            self.model.forget(key)
        for head in heads:
            self.model.release(head, self.chain)

    @rule(agent=AGENTS)
    def purge(self, agent: str) -> None:
        proof = self.store.submit(Purge("default", agent)).result(10)
        model = self.model
        own = model.needed(self.chain, [key for key in model.branches if key[0] == agent])
        before = len(model.blocks)
        self.drop(agent)
        needed = model.needed(self.chain, model.branches)
        model.blocks = {name: block for name, block in model.blocks.items() if name in needed}
        assert proof.slots_freed == (before - len(needed))
        assert proof.bytes_zeroed == (before - len(needed)) * BLOCK_BYTES
        assert proof.blocks_shared == len(own & needed)

    @rule(ticks=st.integers(1, 6))
    def time_passes(self, ticks: int) -> None:
        self.now += ticks * TICK_S

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @precondition(lambda self: self.model.branches)
    @rule(data=st.data())
    def what_is_left_can_be_loaded(self, data: st.DataObject) -> None:
        ids, num_tokens, _ = self.model.branches[data.draw(st.sampled_from(sorted(self.model.branches)))]
        assert warm_tokens(self.store, self.chain(ids[:num_tokens])) == num_tokens

    @invariant()
    def agrees(self) -> None:
        if self.store is None:
            return
        assert self.store.flush(10)
        self.store.check("records")
        model, stats = self.model, self.store.stats()
        records = {(record.agent, record.branch): record for record in self.store.sequences()}
        assert {key: record.num_tokens for key, record in records.items()} == {
            key: num_tokens for key, (_, num_tokens, _) in model.branches.items()
        }
        for key, record in records.items():
            assert record.last_use == model.branches[key][2]
            assert all(end <= record.num_tokens for end in record.turn_ends)
        assert {key: self.told.get(key) for key in model.lost} == model.lost
        assert stats.used_bytes <= stats.disk_bytes
        assert stats.num_blocks == len(model.blocks) == self.on_disk()
        assert all(self.store.contains(name) for name in model.blocks)
        pins = {agent: until for agent, until in model.pins.items() if until >= self.now and until > 0}
        assert {agent: until for (_, agent), until in self.store.pins().items()} == pins
        assert stats.pinned_blocks == len(
            model.needed(self.chain, [key for key in model.branches if key[0] in pins]) & set(model.blocks)
        )
        assert stats.saving_ok and stats.failed_saves == stats.blocks_orphaned == 0

    def on_disk(self) -> int:
        """Records of the first part that lie in the files, looked for without the store."""
        shards = (self.directory / FINGERPRINT.hex()).glob("blocks-0-*.safetensors")
        return sum(path.read_bytes().count(MAGIC) for path in shards)


BudgetMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBudgetMachine = BudgetMachine.TestCase
