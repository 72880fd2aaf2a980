"""Any history of requests, preemptions, aborts, damage and restarts: every record on disk is what its tokens have."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.vllm.engine import Request, StubEngine, expected_rows, reply_of
from tests.vllm.stored import RECORD, Stores, damage, prompt, records_of

FAMILIES = [prompt(400, seed) for seed in range(3)]


class ContractMachine(RuleBasedStateMachine):
    """An engine with little memory; prompts are beginnings of a few sequences, with an end of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.stores = Stores(self.directory)
        self.prompts: dict[str, list[int]] = {}
        self.known: list[list[int]] = []
        self.failures = False
        self.restart()

    @rule()
    def restart(self) -> None:
        """Begin again with nothing hot; requests in progress are gone."""
        if self.prompts or self.stores.opened:
            self.collect()
        self.prompts, self.failures = {}, False
        self.engine = StubEngine(self.stores.open(), num_blocks=60, budget=110, block_tokens=32, kind="heads first")

    @rule(family=st.sampled_from(range(3)), length=st.integers(20, 400), tokens=st.integers(1, 40), own=st.booleans())
    def add(self, family: int, length: int, tokens: int, own: bool) -> None:
        name = f"r{len(self.prompts)}"
        ids = FAMILIES[family][:length] + (prompt(30, length) if own else [])
        self.prompts[name] = ids
        self.engine.add(Request(name, list(ids), tokens, agent=f"agent {family}" if own else None))

    @rule(steps=st.integers(1, 8))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.engine.waiting or self.engine.running:
                before = self.engine.recomputed
                self.engine.step()
                self.failures |= self.engine.recomputed > before

    @precondition(lambda self: self.engine.running)
    @rule(number=st.integers(0, 9), how=st.sampled_from(["preempt", "abort"]))
    def interrupt(self, number: int, how: str) -> None:
        request = self.engine.running[number % len(self.engine.running)]
        (self.engine.preempt if how == "preempt" else self.engine.abort)(request)

    @rule()
    def forget_hot(self) -> None:
        if not self.engine.running:
            self.engine.forget_hot()

    @rule(number=st.integers(0, 99))
    def hurt(self, number: int) -> None:
        """Flip a bit of a record of one of the sequences."""
        found = [block for ids in FAMILIES for block in records_of(self.engine.owner, ids)]
        if found:
            damage(self.directory, found[number % len(found)])

    @invariant()
    def sound(self) -> None:
        self.engine.planner.check()

    def collect(self) -> None:
        """Check the replies, as far as vLLM's own rules make them right, and every record."""
        self.engine.drain()
        for name, ids in self.prompts.items():
            reply = self.engine.replies[name]
            self.known.append(ids + reply)
            if not self.failures:
                assert reply == reply_of(ids, len(reply)), name
        owner = self.engine.owner
        for ids in self.known:
            blocks = records_of(owner, ids)
            rows = [np.zeros(owner.layout.parts[0].payload_bytes, dtype=np.uint8) for _ in blocks]
            good = owner.begin_load(owner.plan_load(blocks), 0, rows).result(10)
            for number, row in enumerate(rows[:good]):
                assert np.array_equal(row, expected_rows(owner.layout, ids[: (number + 1) * RECORD])), number
        assert owner.stats().blocks_orphaned == 0

    def teardown(self) -> None:
        try:
            self.collect()
        finally:
            self.stores.close()
            shutil.rmtree(self.directory)


TestContractMachine = ContractMachine.TestCase
TestContractMachine.settings = settings(max_examples=8, stateful_step_count=20, deadline=None)
