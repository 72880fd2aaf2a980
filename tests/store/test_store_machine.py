"""The store against a dictionary: any order of turns, forks, rewinds, deletions, damage and reopening."""

from __future__ import annotations

import shutil

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.store.commands import Delete
from rekindle.store.files.records import MAGIC
from tests.store.chains import FINGERPRINT, SIZE, Chain, fast_directory, open_store, warm_tokens

AGENTS = st.sampled_from(["ann", "bob", "../évil\n", "ann "])
BRANCHES = st.integers(0, 1)
NAMESPACES = st.sampled_from(["default", "other"])
Key = tuple[str, str, int]


class StoreMachine(RuleBasedStateMachine):
    """`model`: branch -> (ids of its blocks, how many of them are the branch's: a rewound one ends inside a block).

    Ids are drawn from few, so that chains meet, part, and share tails.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = fast_directory()
        self.model: dict[Key, tuple[list[int], int]] = {}
        self.saved: list[tuple[str, str, int, int]] = []

    @initialize()
    def open(self) -> None:
        self.store = open_store(
            self.directory, shard_bytes=1 << 14, staging_bytes=1, on_saved=lambda *turn: self.saved.append(turn)
        )
        self.store.start()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.directory)

    def chain(self, key: Key, ids: list[int]) -> Chain:
        return Chain.of(self.store, ids, key[0])

    def own(self, key: Key) -> list[int]:
        ids, num_tokens = self.model[key]
        return ids[:num_tokens]

    def move(self, key: Key, ids: list[int], num_tokens: int) -> None:
        """Let a branch end inside blocks that are on disk or queued."""
        self.store.save_turn(self.chain(key, ids).record(key[1], key[2], key[0], num_tokens=num_tokens))
        self.model[key] = (ids, num_tokens)

    def write(self, key: Key, ids: list[int]) -> None:
        for block in self.chain(key, ids).blocks:
            while not self.store.stage(block):
                assert self.store.flush(10)
        self.move(key, ids, len(ids))

    @rule(
        namespace=NAMESPACES,
        agent=AGENTS,
        branch=BRANCHES,
        runs=st.lists(st.integers(0, 2), max_size=4),
        tail=st.integers(0, SIZE - 1),
    )
    def turn(self, namespace: str, agent: str, branch: int, runs: list[int], tail: int) -> None:
        ids = [number for run in runs for number in [run] * SIZE] + [7] * tail
        self.write((namespace, agent, branch), ids)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), more=st.integers(1, 40), token=st.integers(0, 2))
    def extend(self, data: st.DataObject, more: int, token: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.write(key, self.own(key) + [token] * more)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), agent=AGENTS, branch=BRANCHES)
    def fork(self, data: st.DataObject, agent: str, branch: int) -> None:
        source = data.draw(st.sampled_from(sorted(self.model)))
        self.move((source[0], agent, branch), *self.model[source])

    @precondition(lambda self: any(num_tokens for _, num_tokens in self.model.values()))
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(key for key, (_, num_tokens) in self.model.items() if num_tokens)))
        ids, num_tokens = self.model[key]
        left = data.draw(st.integers(1, num_tokens))
        self.move(key, ids[: -(-left // SIZE) * SIZE], left)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete_branch(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.store.submit(Delete(*key))
        del self.model[key]

    @rule(namespace=NAMESPACES, agent=AGENTS)
    def delete_agent(self, namespace: str, agent: str) -> None:
        self.store.submit(Delete(namespace, agent))
        self.model = {key: ids for key, ids in self.model.items() if key[:2] != (namespace, agent)}

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()
        self.agrees()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def everything_saved_can_be_loaded(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        assert self.store.flush(10)
        chain = self.chain(key, self.own(key))
        assert warm_tokens(self.store, chain) == len(chain.ids)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), rest=st.lists(st.integers(0, 2), min_size=1, max_size=SIZE))
    def the_nearest_child_is_found(self, data: st.DataObject, rest: list[int]) -> None:
        assert self.store.flush(10)
        key = data.draw(st.sampled_from(sorted(self.model)))
        depth = data.draw(st.integers(0, len(self.model[key][0]) // SIZE))
        before = self.model[key][0][: depth * SIZE]
        names = self.chain(key, before).full_names
        found = self.store.child(names[-1] if names else self.chain(key, []).root, np.array(rest, dtype=np.uint32))
        best = max(
            self.common(ids[len(before) :], rest)
            for (namespace, _, _), (ids, _) in self.model.items()
            if namespace == key[0] and ids[: len(before)] == before
        )
        assert (found[1] if found else 0) == best

    @staticmethod
    def common(stored: list[int], asked: list[int]) -> int:
        count = 0
        while count < min(len(stored), len(asked), SIZE) and stored[count] == asked[count]:
            count += 1
        return count

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store.flush(10)
        self.store.check("records")
        records = {(r.namespace, r.agent, r.branch): r for r in self.store.sequences()}
        found = {key: self.store.sequence_ids(record).tolist() for key, record in records.items()}
        assert found == {key: self.own(key) for key in self.model}
        told = {turn[:3]: turn[3] for turn in self.saved}
        assert {key: told.get(key) for key in self.model} == {key: num for key, (_, num) in self.model.items()}
        # a block is on disk exactly while a branch needs it: nothing leaks, nothing is stored twice
        needed = {block.identity.hash for key, (ids, _) in self.model.items() for block in self.chain(key, ids).blocks}
        stats = self.store.stats()
        assert stats.num_blocks == len(needed)
        assert stats.turns_unsaved == stats.blocks_orphaned == stats.failed_saves == 0
        assert self.on_disk() == len(needed), "freed slots still hold records"

    def on_disk(self) -> int:
        """Records of the first part that lie in the files, looked for without the store."""
        shards = (self.directory / FINGERPRINT.hex()).glob("blocks-0-*.safetensors")
        return sum(path.read_bytes().count(MAGIC) for path in shards)


StoreMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestStoreMachine = StoreMachine.TestCase
