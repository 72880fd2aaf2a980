"""Any history of a hybrid engine: every reply is right at every time, every part on disk is what its tokens have."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.parts import FULL, STATE, WindowPart
from tests.vllm.engine import reply_of
from tests.vllm.hybrid import HybridEngine, HybridRequest, Kind
from tests.vllm.stored import PAYLOAD_OFFSET, STATE_OFFSET, Stores, check_parts, damage, prompt, records_of

FAMILIES = [prompt(400, seed) for seed in range(3)]
KINDS = [
    Kind(((FULL, 16), (WindowPart(64), 16), (WindowPart(64), 16), (STATE, 64))),
    Kind(((FULL, 128), (WindowPart(48), 16), (STATE, 64))),
    Kind(((FULL, 48), (WindowPart(64), 48), (WindowPart(48), 16))),
]


class HybridMachine(RuleBasedStateMachine):
    """An engine with little memory; prompts are beginnings of a few sequences, with an end of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.stores = Stores(self.directory)
        self.prompts: dict[str, list[int]] = {}
        self.known: list[list[int]] = []

    @initialize(kind=st.sampled_from(KINDS))
    def choose(self, kind: Kind) -> None:
        self.kind = kind
        self.open()
        for number, ids in enumerate(FAMILIES[:2]):
            self.engine.serve(f"first {number}", ids[: 300 - 80 * number], 20, agent=f"agent {number}")
        self.open()

    def open(self) -> None:
        self.prompts = {}
        self.engine = HybridEngine(self.stores.open(layout=self.kind.layout()), self.kind, num_blocks=90, budget=110)

    @rule()
    def restart(self) -> None:
        self.collect()
        self.open()

    @rule(
        family=st.sampled_from(range(3)),
        length=st.integers(20, 400),
        tokens=st.integers(1, 70),
        own=st.booleans(),
        limit=st.sampled_from([None, None, None, 150]),
        count=st.integers(1, 3),
    )
    def add(self, family: int, length: int, tokens: int, own: bool, limit: int | None, count: int) -> None:
        """Add requests, each with a longer beginning of the sequence."""
        for more in range(count):
            name = f"r{len(self.prompts)}"
            ids = FAMILIES[family][: length + 60 * more] + (prompt(30, length) if own else [])
            self.prompts[name] = ids
            agent = f"agent {family}" if own else None
            self.engine.add(HybridRequest(name, list(ids), tokens, agent=agent, limit=limit))

    @precondition(lambda self: self.known)
    @rule(number=st.integers(0, 99), tokens=st.integers(1, 70))
    def resume(self, number: int, tokens: int) -> None:
        """Continue a conversation."""
        name, ids = f"r{len(self.prompts)}", self.known[number % len(self.known)]
        self.prompts[name] = (ids + prompt(30, number))[:600]
        self.engine.add(HybridRequest(name, list(self.prompts[name]), tokens))

    @rule(steps=st.integers(1, 8), aborts=st.booleans())
    def run(self, steps: int, aborts: bool) -> None:
        for _ in range(steps):
            if self.engine.is_busy:
                self.engine.begin()
                if aborts and self.engine.loading:
                    self.engine.abort(next(iter(self.engine.loading.values())))
                self.engine.end()

    @precondition(lambda self: self.engine.running)
    @rule(number=st.integers(0, 9), how=st.sampled_from(["preempt", "abort"]))
    def interrupt(self, number: int, how: str) -> None:
        request = self.engine.running[number % len(self.engine.running)]
        (self.engine.preempt if how == "preempt" else self.engine.abort)(request)

    @rule()
    def forget_hot(self) -> None:
        """What follows is loaded."""
        self.engine.forget_hot()

    @rule(number=st.integers(0, 99), part=st.integers(0, 2))
    def hurt(self, number: int, part: int) -> None:
        """Flip a bit of a part of a record of one of the sequences, and ask for that one, no longer hot."""
        self.engine.forget_hot()
        owner = self.engine.owner
        found = [(ids, block) for ids in FAMILIES for block in records_of(owner, ids) if part in block.parts]
        if found:
            ids, block = found[number % len(found)]
            offset = STATE_OFFSET if owner.layout.parts[part].states else PAYLOAD_OFFSET
            damage(self.directory, block, part, offset)
            self.add(FAMILIES.index(ids), 400, 5, own=False, limit=None, count=1)

    @invariant()
    def sound(self) -> None:
        self.engine.planner.check()
        self.engine.check_blocks()
        assert not self.engine.spoilt

    def collect(self) -> None:
        """Check the replies and every record."""
        self.engine.drain()
        for name, ids in self.prompts.items():
            reply = self.engine.replies[name]
            self.known.append(ids + reply)
            assert reply == reply_of(ids, len(reply)), name
        for ids in self.known:
            check_parts(self.engine.owner, self.kind, ids)
        assert self.engine.owner.stats().blocks_orphaned == 0
        self.engine.owner.store.check()

    def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                self.collect()
        finally:
            self.stores.close()
            shutil.rmtree(self.directory)


TestHybridMachine = HybridMachine.TestCase
TestHybridMachine.settings = settings(max_examples=8, stateful_step_count=20, deadline=None)
