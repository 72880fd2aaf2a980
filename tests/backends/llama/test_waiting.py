"""What waits for a state that is lost, or that goes with another agent, goes on to another slot or to the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rekindle import Engine
from rekindle.cache.blocks.hashing import chain_hashes
from rekindle.engine.core.interface import Core
from rekindle.store.commands import Pin
from rekindle.store.values import SequenceRecord
from rekindle_backends.llama import keeping
from tests.backends.llama.test_slot_memory import Talk, front

WAIT_S = 60.0
pytestmark = pytest.mark.usefixtures("program")


@pytest.fixture(autouse=True)
def _rests_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "REST_S", WAIT_S)


def generate(engine: Engine, agent: str, prompt: list[int], most: int) -> None:
    engine.agent(agent).generate(np.array(prompt, np.uint32), max_tokens=most, temperature=0)


def requests(log: Path) -> list[str]:
    """What the imitation was asked so far, with the questions of the start."""
    return log.read_text().splitlines()


def in_two_slots(engine: Engine, talk: Talk, log: Path) -> list[list[int]]:
    """Turns of a and b that share four blocks, at once, so that each has a slot: a the first one, and it ends first.

    Return their prompts, of six blocks.
    """
    shared, before = talk.more(256), requests(log)
    prompts = [[*shared, *talk.more(140)] for _ in range(2)]
    first = threading.Thread(target=generate, args=(engine, "a", prompts[0], 4))
    first.start()
    end = time.monotonic() + WAIT_S
    while requests(log) == before:
        assert time.monotonic() < end
        time.sleep(0.01)
    generate(engine, "b", prompts[1], 24)
    first.join()
    assert [line.split()[0] for line in requests(log)[-2:]] == ["0", "1"]
    return prompts


@pytest.mark.parametrize("end", ["purge", "delete", "failed read"])
def test_a_turn_outlasts_that_of_another_agent_which_shares_its_prompt(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setenv("IMITATION_FULL", str(full := tmp_path / "full"))
    monkeypatch.setenv("IMITATION_TOKEN_S", "0.05")
    monkeypatch.setenv("IMITATION_ENDS", "0")
    with front(gguf, tmp_path / "store") as engine:
        in_two_slots(engine, Talk(gguf, tmp_path / "log"), tmp_path / "log")
        if end == "failed read":
            full.touch()
        else:
            {"purge": engine.agent("a").purge, "delete": engine.agent("a").delete}[end]()
        assert engine.flush()
        engine.check()
    full.unlink(missing_ok=True)
    with front(gguf, tmp_path / "store") as engine:
        assert engine.agent("b").info().warm_tokens == 384


def in_one_step(engine: Engine, work: Callable[[Core], object]) -> None:
    """Do something between two steps of the engine."""
    engine.components.loop.call(work).result(WAIT_S)


def record(core: Core, agent: str, ids: list[int]) -> SequenceRecord:
    """The first branch of an agent, which ends after these tokens, a whole number of blocks."""
    root = core.cache.root("default")
    head = tuple(chain_hashes(root, np.array(ids, np.uint32), 64))[-1]
    return SequenceRecord("default", agent, 1, root, head, len(ids), len(ids), time.time())


def test_a_turn_that_ends_while_its_agent_is_offloaded_is_saved(gguf: Path, tmp_path: Path) -> None:
    """With all that waits for its state."""
    talk, pin = Talk(gguf, tmp_path / "log"), Pin("default", "a", 0.0)

    def emptied(core: Core) -> None:
        core.save(record(core, "b", talk.ids["a"][:256]))
        core.save(pin)
        core.forget("default", "a")

    with front(gguf, tmp_path / "store", slots=1) as engine:
        talk.turn(engine, "a", 300)
        assert engine.flush()
        talk.turn(engine, "a")
        in_one_step(engine, emptied)
        assert pin.done.result(WAIT_S)
        assert engine.flush()
        store = engine.stats().store
        assert store is not None and store["turns_unsaved"] == 0
        engine.check()
    with front(gguf, tmp_path / "store", slots=1) as engine:
        assert engine.agent("b").info().warm_tokens == 256
        assert engine.agent("a").info().warm_tokens == len(talk.ids["a"]) // 64 * 64


def test_turns_of_one_branch_reach_the_store_in_their_order(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait in two slots, of which the second one is read first, as another agent continues what it has."""
    monkeypatch.setenv("IMITATION_TOKEN_S", "0.05")
    monkeypatch.setenv("IMITATION_ENDS", "0")
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store") as engine:
        prompts = in_two_slots(engine, talk, tmp_path / "log")
        for ids in (prompts[0][:320], prompts[1][:384]):
            in_one_step(engine, lambda core, ids=ids: core.save(record(core, "c", ids)))
        generate(engine, "d", [*prompts[1], *talk.more(10)], 1)
        assert engine.flush()
        engine.check()
    with front(gguf, tmp_path / "store") as engine:
        assert engine.agent("c").info().warm_tokens == 384
