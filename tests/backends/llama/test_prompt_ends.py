"""States at the end of a prompt, before an imitation of llama-server: a template drops the reasoning of earlier replies
once the user speaks again, so that the next prompt parts from the text where the first reply to the user began."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from rekindle import Engine
from rekindle_backends.llama import keeping
from rekindle_backends.llama.partings import MOST_USELESS, Partings
from tests.backends.llama import imitation
from tests.backends.llama.reasoning import Reasoned
from tests.backends.llama.recording import write_model
from tests.backends.llama.test_slot_memory import Talk, front, server_of, until_answers
from tests.text.families import HERMES

pytestmark = pytest.mark.usefixtures("program")
FEW = 3 + 1  # tokens between a prompt's end and the state before it, and the last one of a reply


class Agents:
    """Agents whose replies are compared with those that are computed without any memory."""

    def __init__(self, gguf: Path, log: Path, names: Iterable[str], most: int = 90) -> None:
        self.talk, self.most = Talk(gguf, log), most
        self.all = {name: Reasoned(self.talk.more(2)) for name in names}

    def ask(self, engine: Engine, name: str, kind: str, count: int = 20) -> tuple[int, int]:
        """Return how many tokens were computed for a turn, and how many are new since what all prompts have."""
        return self.turn(engine, name, kind, self.talk.more(count))

    def go_on(self, engine: Engine, kinds: Iterable[str], when: str) -> None:
        """Have all of them take these turns, each of which computes what is new."""
        for kind in kinds:
            for name in self.all:
                computed, new = self.ask(engine, name, kind)
                assert computed <= new + FEW, f"{name}, {kind}, {when}"

    def turn(self, engine: Engine, name: str, kind: str, new: list[int]) -> tuple[int, int]:
        agent = self.all[name]
        known = len(agent.before) if kind == "message" else len(agent.prompt) + len(agent.turns[-1][1])
        prompt = agent.message(new) if kind == "message" else agent.result(new)
        wanted = imitation.reply(self.talk.model, prompt, self.most)
        result = engine.agent(name).generate(np.array(prompt, np.uint32), max_tokens=self.most, temperature=0)
        assert [*result.token_ids] == wanted, f"{name} got another reply"
        agent.replied(wanted)
        return len(prompt) - result.report.hot_tokens - result.report.warm_tokens, len(prompt) - known


def test_a_prompt_goes_on_from_the_end_of_the_one_before_the_reasoning(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More agents than slots; between messages more turns with tools than there are points for."""
    monkeypatch.setenv("IMITATION_STATE", "with rows")
    monkeypatch.setenv("IMITATION_ENDS", "0")
    agents = Agents(gguf, tmp_path / "log", "ab")
    with front(gguf, tmp_path / "store", slots=1) as engine:
        for name in "ab":
            agents.ask(engine, name, "message", 200)
        agents.go_on(engine, ("message", *["result"] * 5, "message"), "hot")
        assert engine.flush()
        server_of().send_signal(signal.SIGKILL)
        time.sleep(0.2)
        until_answers(engine)
        agents.go_on(engine, ("message", "result", "result"), "after a kill")
        assert engine.flush()
        agents.ask(engine, "a", "message")
        assert engine.flush()
        computed, new = agents.ask(engine, "a", "result")
        assert computed <= new + 1, "its slot has gone back"
        assert engine.flush()
        engine.check()
        shutil.copytree(tmp_path / "store", tmp_path / "crashed")  # as a kill leaves it
    with front(gguf, tmp_path / "crashed", slots=1) as engine:
        agents.go_on(engine, (*["result"] * 4, "message", "message"), "from disk")
        engine.check()


def test_windows_go_on_from_there_once_a_prompt_has_parted(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More agents than slots, and replies longer than a window: the first prompts that part are computed again."""
    monkeypatch.setenv("IMITATION_WINDOW", str(imitation.WINDOW))
    monkeypatch.setenv("IMITATION_ENDS", "0")
    agents = Agents(gguf, tmp_path / "log", "ab", most=imitation.WINDOW + 70)
    back = tmp_path / "log.back"
    with front(gguf, tmp_path / "store", slots=1) as engine:
        for name in "ab":
            agents.ask(engine, name, "message", 200)
        assert not back.exists()
        for name in "ab":
            computed, new = agents.ask(engine, name, "message")
            assert computed >= 200 + new, "of windows nothing is kept before it was of use"
        agents.go_on(engine, ("message", "result", "result", "message", "message"), "hot")
        assert engine.flush()
        server_of().send_signal(signal.SIGKILL)
        time.sleep(0.2)
        until_answers(engine)
        agents.go_on(engine, ("message", "result", "result"), "after a kill")
        assert engine.flush()
        engine.check()
        shutil.copytree(tmp_path / "store", tmp_path / "crashed")  # as a kill leaves it
    with front(gguf, tmp_path / "crashed", slots=1) as engine:
        agents.go_on(engine, ("message", "result"), "from disk")
        engine.check()


def test_a_template_with_reasoning_is_expected_to_drop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the end of the first prompt is kept, if it is longer than a window."""
    monkeypatch.setenv("IMITATION_WINDOW", str(imitation.WINDOW))
    monkeypatch.setenv("IMITATION_ENDS", "0")
    window, template = {"llama.attention.sliding_window": imitation.WINDOW}, {"tokenizer.chat_template": HERMES}
    gguf = write_model(tmp_path, **window, **template)
    agents = Agents(gguf, tmp_path / "log", "ab", most=imitation.WINDOW)
    with front(gguf, "off", slots=1) as engine:
        for name, count in (("b", imitation.WINDOW), ("a", imitation.WINDOW + 5)):
            agents.ask(engine, name, "message", count)
            assert engine.flush()
        assert len((tmp_path / "log.back").read_text().splitlines()) == 1
        agents.ask(engine, "b", "message")
        computed, new = agents.ask(engine, "a", "message")
        assert computed <= new + FEW
        engine.check()


def test_the_slot_that_went_back_is_not_the_one_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one was restored, so it has no checkpoint, and the rows where a prompt parts were used again."""
    monkeypatch.setenv("IMITATION_WINDOW", str(imitation.WINDOW))
    monkeypatch.setenv("IMITATION_ENDS", "0")
    window, template = {"llama.attention.sliding_window": imitation.WINDOW}, {"tokenizer.chat_template": HERMES}
    agents = Agents(write_model(tmp_path, **window, **template), tmp_path / "log", "a")
    with front(tmp_path / "pocket.gguf", "off", slots=2) as engine:
        for kind, count in (("message", 700), ("result", 100), ("result", 100), ("message", 100)):
            computed, new = agents.ask(engine, "a", kind, count)
            assert computed <= new + FEW, kind
            assert engine.flush()
        engine.check()


def test_the_end_of_a_prompt_is_read_many_turns_later(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent comes back before its slot is read; other replies to the same prompt begin in the same block."""
    monkeypatch.setenv("IMITATION_STATE", "alone")
    monkeypatch.setenv("IMITATION_ENDS", "0")
    monkeypatch.setattr(keeping, "REST_S", 60.0)
    agents = Agents(gguf, tmp_path / "log", "ab", most=30)
    with front(gguf, tmp_path / "store", slots=1) as engine:
        agents.ask(engine, "a", "message", 200)
        for _ in range(3):
            agents.ask(engine, "a", "result", 40)
        agents.ask(engine, "b", "message", 200)
        assert len((tmp_path / "log.back").read_text().splitlines()) == 1
        computed, new = agents.ask(engine, "a", "message")
        assert computed <= new + FEW
        for seed in (1, 2):
            agents.ask(engine, "b", "message")
            prompt = np.array(agents.all["a"].prompt, np.uint32)
            result = engine.agent("a").generate(prompt, max_tokens=30, temperature=1, seed=seed)
            assert len(prompt) - result.report.hot_tokens - result.report.warm_tokens == FEW - 1
        agents.ask(engine, "b", "message")
        agents.all["a"].replied([int(each) for each in result.token_ids])
        computed, new = agents.ask(engine, "a", "message")
        assert computed <= new + FEW, "the last reply's block lacks the state"
        engine.check()


def test_short_turns_leave_the_end_of_the_prompt(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turn ends in the block of its prompt's end, and so does the one after it."""
    monkeypatch.setenv("IMITATION_STATE", "with rows")
    monkeypatch.setenv("IMITATION_ENDS", "0")
    agents = Agents(gguf, tmp_path / "log", "ab", most=6)
    with front(gguf, tmp_path / "store", slots=1) as engine:
        for kinds in (("message", "message"), ("message", "result", "message")):
            for kind in kinds:
                agents.ask(engine, "b", "message")
                computed, new = agents.ask(engine, "a", kind, 194 if not agents.all["a"].before else 8)
                assert computed <= (200 if new > 100 else new + 64 if kind == "result" else new + FEW)
        engine.check()


def test_another_text_of_the_same_length_has_no_state(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts part four tokens after a block begins; the slot of the second one does not go back."""
    monkeypatch.setenv("IMITATION_STATE", "with rows")
    monkeypatch.setenv("IMITATION_ENDS", "0")
    agents = Agents(gguf, tmp_path / "log", "ab", most=90)
    prompt = agents.talk.more(198)
    with front(gguf, tmp_path / "store", slots=1) as engine:
        agents.turn(engine, "a", "message", [*prompt, *agents.talk.more(2)])
        assert engine.flush()
        monkeypatch.setattr(keeping, "MOST_STUCK", 0)
        agents.turn(engine, "b", "message", [*prompt[:196], *agents.talk.more(4)])
        assert engine.flush()
        agents.ask(engine, "a", "message")
        assert agents.ask(engine, "b", "message")[0] > 200
        engine.check()


def test_a_server_without_checkpoints_is_not_asked_for_long(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMITATION_STATE", "with rows")
    monkeypatch.setenv("IMITATION_ENDS", "0")
    monkeypatch.setenv("IMITATION_STUCK", "1")
    agents = Agents(gguf, tmp_path / "log", "abcde", most=20)
    with front(gguf, tmp_path / "store", slots=1) as engine:
        for name in "abcde":
            agents.ask(engine, name, "message", 120)
        for name in "abcde":
            computed, new = agents.ask(engine, name, "result")
            assert computed <= new + 1
        engine.check()
    assert len((tmp_path / "log.back").read_text().splitlines()) == keeping.MOST_STUCK


def test_what_stays_until_a_conversation_parts() -> None:
    partings, ids = Partings(is_expected=True), np.arange(1000, dtype=np.uint32)
    other = np.concatenate([ids[:398], ids[500:]])

    def note(agent: str, ids: np.ndarray, num_prompt: int, *points: int) -> tuple[int | None, set[int]]:
        staying = partings.note(("", agent), ids, num_prompt, points)
        return staying.back, {*staying.points}

    assert note("a", ids[:450], 400) == (397, {397})
    assert note("a", ids[:600], 550, 449) == (None, {397})
    assert note("a", ids[:800], 700, 599, 449) == (None, {397})
    assert note("a", other[:600], 500, 397) == (497, {497}), "it parted within the reply, or just before"
    # Of what another process began, nothing is known.
    assert note("b", ids[:450], 400, 300, 200) == (397, {397, 300, 200})
    # A conversation of its own leaves the other one known.
    assert note("a", ids[100:300], 150) == (147, {147})
    assert note("a", other[:900], 800) == (None, {497})
    # Conversations that never part keep no more at the end of their first prompt; one that does, changes that, if it
    # does not part before the state.
    for number in range(MOST_USELESS):
        note(f"{number}", ids[:450], 400)
        note(f"{number}", ids[:600], 550)
    assert note("c", ids[:450], 402, 64) == (None, {64})
    assert note("c", other[:450], 400) == (None, set())
    assert note("c", ids[:600], 500) == (497, {497})
    assert note("d", ids[:450], 400) == (397, {397})
    least = Partings(is_expected=True, least=397)
    assert least.note(("", "a"), ids[:450], 400, ()).back is None, "no window ends there"
    assert least.note(("", "b"), ids[:450], 401, ()).back == 398
    partings.forget(("", "d"))
    assert note("d", ids[:600], 550) == (547, {547})
