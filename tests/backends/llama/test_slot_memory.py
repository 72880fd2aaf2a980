"""Memories before an imitation of llama-server, whose next token follows from every row that it has in a slot."""

from __future__ import annotations

import os
import queue
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace

import numpy as np
import psutil
import pytest

from rekindle import Engine, pocket
from rekindle.errors import BadRequest, RekindleError
from rekindle.kv.arena import KVArena
from rekindle_backends.llama import keeping
from rekindle_backends.llama.slot_folder import RamDisk
from rekindle_backends.llama.transfer import take
from rekindle_lab.bench.engine.gguf_file import write_file
from rekindle_lab.bench.engine.gguf_model import contents
from tests.backends.llama import imitation
from tests.backends.llama.imitation import WINDOW

FILE = Path(imitation.__file__)
NUM_ROUNDS = int(os.environ.get("FRONT_KILLS", "2"))  # of twelve turns, in which a server is killed now and then
pytestmark = pytest.mark.usefixtures("program")


@pytest.fixture(params=["rows", "windows", "states"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the model keeps of a token."""
    if request.param == "windows":
        monkeypatch.setenv("IMITATION_WINDOW", str(WINDOW))
    if request.param == "states":
        monkeypatch.setenv("IMITATION_STATE", "with rows")
    return str(request.param)


@contextmanager
def front(
    gguf: Path,
    store: Path | str,
    slots: int = 2,
    hot_bytes: int = 16 << 20,
    context: int = 2048,
    more: str = "",
    share: float = 1.0,
) -> Iterator[Engine]:
    """An engine whose requests the imitation computes."""
    flags = f"-np {slots} -c {slots * context} {more}"
    engine = Engine(
        model=str(gguf),
        backend="llama.cpp",
        backend_flags=flags,
        store=str(store),
        hot_bytes=hot_bytes,
        namespace_share=share,
    )
    with engine:
        yield engine


class Talk:
    """Agents that talk to an engine: every reply is compared with that which is computed without any memory."""

    def __init__(self, gguf: Path, log: Path) -> None:
        self.model, self._encode = imitation.model_of()
        self._log = log
        self.ids: dict[str, list[int]] = {}
        self.ends: dict[str, list[int]] = {}  # of turns
        self.draw = random.Random(5)

    def more(self, count: int) -> list[int]:
        return [self.draw.choice(self.model.words) for _ in range(count)]

    def turn(self, engine: Engine, agent: str, count: int = 20, most: int = 12) -> int:
        """One more turn; return how many tokens were computed for its prompt."""
        prompt = [*self.ids.get(agent, []), *self.more(count)]
        result = engine.agent(agent).generate(np.array(prompt, np.uint32), max_tokens=most, temperature=0)
        wanted = imitation.reply(self.model, prompt, most)
        assert [*result.token_ids] == [each for each in wanted if each != self.model.end], f"{agent} got another reply"
        self.ids[agent] = [*prompt, *result.token_ids]
        self.ends.setdefault(agent, []).append(len(self.ids[agent]))
        computed, reused = map(int, self._log.read_text().splitlines()[-1].split()[1:])
        report = result.report
        assert report.hot_tokens + report.warm_tokens == reused and computed + reused == len(prompt)
        return computed


def server_of() -> psutil.Process:
    """The process of the imitation that this test started."""
    ours = psutil.Process().children(recursive=True)
    return next(each for each in ours if str(FILE) in each.cmdline() and "keeper" not in " ".join(each.cmdline()))


def until_answers(engine: Engine) -> None:
    """Wait for a server that was killed to be there again."""
    end = time.monotonic() + 60
    while not engine.health().computes or server_of().status() == psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "it was not started again"
        time.sleep(0.05)


def test_more_agents_than_slots_compute_what_is_new(gguf: Path, tmp_path: Path, kept: str) -> None:
    """Of a first turn that is short, with states, the one at the end of its prompt is kept, in the same block."""
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store") as engine:
        for agent in "abcde":
            talk.turn(engine, agent, 300)
        for number in range(3):
            most = 12 + 3 if kept == "states" and not number else 1  # the last token of a reply is not computed
            for agent in "abcde":
                assert talk.turn(engine, agent) <= 20 + most
        engine.check()
        stats = engine.stats()
        assert stats.reused_tokens > 0.6 * stats.prompt_tokens


@pytest.mark.usefixtures("kept")
def test_memories_outlast_both_processes(gguf: Path, tmp_path: Path) -> None:
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store") as engine:
        for agent in "abc":
            talk.turn(engine, agent, 300)
        assert engine.flush()
        server_of().send_signal(signal.SIGKILL)
        time.sleep(0.2)
        until_answers(engine)
        assert [talk.turn(engine, agent) <= 20 + 64 for agent in "abc"] == [True] * 3
        assert engine.flush()
    with front(gguf, tmp_path / "store") as engine:
        assert engine.num_warm_agents == 3
        assert [talk.turn(engine, agent) <= 20 + 64 for agent in "abc"] == [True] * 3
        engine.check()


def test_a_state_that_was_not_read_is_computed_again(gguf: Path, tmp_path: Path) -> None:
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store", slots=1) as engine:
        talk.turn(engine, "a", 200)
        server_of().send_signal(signal.SIGKILL)
        time.sleep(0.2)
        until_answers(engine)
        assert talk.turn(engine, "a") > 200
        assert engine.flush() and engine.health().ok
        engine.check()


def test_forks_and_rewinds_go_on_from_what_is_stored(gguf: Path, tmp_path: Path, kept: str) -> None:
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store") as engine:
        talk.turn(engine, "a", 300)
        assert engine.flush()
        before = list(talk.ids["a"])
        talk.turn(engine, "a", 150)
        engine.agent("a").fork("b")
        talk.ids["b"] = list(talk.ids["a"])
        assert engine.flush()
        assert talk.turn(engine, "a", 5, 3) <= 5 + 64  # ends in the same block
        assert engine.flush()
        assert talk.turn(engine, "other", 100) and talk.turn(engine, "another", 100)
        assert talk.turn(engine, "b") <= 20 + 64
        assert talk.turn(engine, "a") <= 20 + 64
        engine.agent("a").rewind(3)
        talk.ids["a"] = before
        assert kept == "windows" or talk.turn(engine, "a") <= 20 + 64
        engine.check()


@pytest.mark.parametrize("state", ["with rows", "alone"])
def test_states_are_kept_at_ends_of_turns(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """What leaves the text inside a turn goes on from the end of the one before; short turns end in the same block."""
    monkeypatch.setenv("IMITATION_STATE", state)
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store", slots=1) as engine:
        for count in (300, 150, 5, 200, 130):
            talk.turn(engine, "a", count)
            assert engine.flush()
        talk.turn(engine, "other", 100)
        assert engine.flush()
        engine.check()
        shutil.copytree(tmp_path / "store", tmp_path / "crashed")  # as a kill leaves it
    whole, ends = talk.ids["a"], talk.ends["a"]
    with front(gguf, tmp_path / "crashed", slots=1) as engine:
        for cut, last in ((ends[3], 3), (ends[4] - 5, 3), (ends[2], 2), (ends[1] - 1, 0), (ends[0] + 7, 0)):
            talk.ids["a"] = whole[:cut]
            point = ends[last] if last else 300 - 3  # in one block, the end of the first prompt goes first
            assert talk.turn(engine, "a") <= cut - point + 20 + 1, f"cut at {cut} of {ends}"
            talk.turn(engine, "other")
        engine.check()


def test_shared_beginnings_are_stored_once(gguf: Path, tmp_path: Path) -> None:
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store") as engine:
        shared = talk.more(256)
        for agent in "abcd":
            talk.ids[agent] = list(shared)
            talk.turn(engine, agent, 30)
            assert engine.flush()
        store = engine.stats().store
        assert store is not None and store["num_blocks"] == 4


def test_a_purge_empties_slots_and_disk(gguf: Path, tmp_path: Path) -> None:
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store") as engine:
        talk.turn(engine, "a", 200)
        talk.turn(engine, "b", 200)
        engine.agent("a").purge()
        assert engine.flush()
        prompt = np.array(talk.ids["a"], np.uint32)
        report = engine.agent("c").generate(prompt, max_tokens=1).report
        assert report.hot_tokens + report.warm_tokens == 0
        assert talk.turn(engine, "b") <= 20 + 64
        engine.check()


@pytest.mark.usefixtures("kept")
def test_turns_survive_kills_of_either_process(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random turns of more agents than slots that go on, are cut back, forked and purged, with kills of the server and
    restarts of the front between them. `FRONT_KILLS` says how often the front is started (`make torture`)."""
    monkeypatch.setattr("rekindle.harness.own_server.STEADY_S", 0.0)  # each kill is the first: a pause of one second
    talk, rounds = Talk(gguf, tmp_path / "log"), random.Random(11)
    agents = [f"agent-{number}" for number in range(6)]
    for _ in range(NUM_ROUNDS):
        with front(gguf, tmp_path / "store", slots=3) as engine:
            for _ in range(12):
                agent, other = rounds.sample(agents, 2)
                ids, what = talk.ids.get(agent, []), rounds.random()
                if ids and what < 0.4:
                    cut = rounds.choice([*talk.ends[agent], rounds.randrange(1, len(ids))])
                    whose = agent if what < 0.3 else other
                    talk.ids[whose], talk.ends[whose] = ids[:cut], [at for at in talk.ends[agent] if at <= cut]
                elif ids and what < 0.45:
                    engine.agent(agent).purge()
                try:
                    talk.turn(engine, agent, rounds.randrange(5, 120))
                except RekindleError:
                    until_answers(engine)
                if rounds.random() < 0.1:
                    server_of().send_signal(signal.SIGKILL)
                    time.sleep(0.2)
                    until_answers(engine)
            engine.check()


@pytest.fixture
def profiled() -> Iterator[Callable[[Callable[[FrameType, str, object], None]], None]]:
    """Has a function called when functions begin and end on threads that start later, as a debugger does."""
    yield threading.setprofile
    threading.setprofile(None)


def test_a_purge_while_a_state_is_copied_leaves_nothing_of_it(
    gguf: Path, tmp_path: Path, profiled: Callable[[Callable[[FrameType, str, object], None]], None]
) -> None:
    copied, is_purged = queue.SimpleQueue[tuple[KVArena, Sequence[int]]](), threading.Event()
    was_purged = queue.SimpleQueue[bool]()

    def stop(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is take.__code__:
            arena, blocks = frame.f_locals["arena"], [*frame.f_locals["blocks"]]
            assert arena.parts[0][blocks].any()
            copied.put((arena, blocks))
            was_purged.put(is_purged.wait(60))

    profiled(stop)
    with front(gguf, tmp_path / "store") as engine:
        Talk(gguf, tmp_path / "log").turn(engine, "a", 200)
        arena, blocks = copied.get(timeout=60)
        engine.agent("a").purge()
        is_purged.set()
        assert was_purged.get(timeout=60), "the purge waited for the copy"
        end = time.monotonic() + 10
        while arena.parts[0][blocks].any():
            assert time.monotonic() < end, "rows of a purged agent are in free blocks"
            time.sleep(0.01)


def test_namespaces_share_nothing(gguf: Path, tmp_path: Path) -> None:
    talk = Talk(gguf, tmp_path / "log")
    prompt = np.array(talk.more(300), np.uint32)
    with front(gguf, tmp_path / "store", slots=1) as engine:
        engine.agent("a", namespace="one").generate(prompt, max_tokens=4)
        report = engine.agent("a", namespace="two").generate(prompt, max_tokens=4).report
        assert report.hot_tokens + report.warm_tokens == 0


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_namespace_beyond_its_share_gives_way_before_others(gguf: Path, tmp_path: Path, share: float) -> None:
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, "off", slots=1, hot_bytes=1 << 20, share=share) as engine:
        quiet = engine.agent("early", namespace="quiet")
        quiet.generate(np.array(talk.more(300), np.uint32), max_tokens=1)
        assert engine.flush()
        before, number = engine.stats().num_evictions, 0
        while engine.stats().num_evictions < before + 20:
            flood = engine.agent(f"agent-{(number := number + 1)}", namespace="flood")
            prompt = talk.more(300)
            for end in (150, 300, 200):  # at 200 a known block lacks its window
                flood.generate(np.array([*prompt[:end], *talk.more(40)], np.uint32), max_tokens=1)
                assert engine.flush()
                engine.check()
        assert (quiet.info().hot_tokens > 0) == (share < 1), "used longest ago of all"
        engine.check()


def test_a_request_that_is_not_sent_holds_nothing(gguf: Path, tmp_path: Path) -> None:
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store", slots=1) as engine:
        talk.turn(engine, "a", 300)
        talk.turn(engine, "b", 300)
        prompt = np.array([*talk.ids["a"], *talk.more(20)], np.uint32)
        with pytest.raises(BadRequest, match="min_tokens"):
            engine.agent("a").generate(prompt, max_tokens=4, min_tokens=2)
        assert engine.agent("a").purge().hot_blocks_left == 0
        engine.check()


@pytest.mark.usefixtures("kept")
def test_a_turn_is_kept_before_another_agent_continues_it(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "REST_S", 60.0)
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store", slots=1) as engine:
        talk.turn(engine, "a", 265)
        talk.ids["b"] = list(talk.ids["a"])
        talk.turn(engine, "b")
        engine.agent("b").purge()
    with front(gguf, tmp_path / "store", slots=1) as engine:
        assert engine.num_warm_agents == 1
        assert talk.turn(engine, "a") <= 20 + 64


@pytest.mark.parametrize("most_unkept_s", [60.0, 0.5])
def test_a_long_state_is_read_when_nothing_computes_or_is_due(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_unkept_s: float
) -> None:
    """The other reply takes at least two seconds."""
    monkeypatch.setenv("IMITATION_SAVES", str(saves := tmp_path / "saves"))
    monkeypatch.setattr(keeping, "REST_S", 0.3)
    monkeypatch.setattr(keeping, "SHORT_S", -1.0)
    monkeypatch.setattr(keeping, "MOST_UNKEPT_S", most_unkept_s)
    monkeypatch.setenv("IMITATION_TOKEN_S", "0.1")
    talk = Talk(gguf, tmp_path / "log")
    while len(imitation.reply(talk.model, other := talk.more(100), 20)) < 20:
        pass
    with front(gguf, tmp_path / "store") as engine:
        saves.unlink()  # those of the start
        talk.turn(engine, "a", 100, most=1)
        engine.agent("b").generate(np.array(other, np.uint32), max_tokens=20, temperature=0)
        assert engine.flush()
    num_computing = [int(line.split()[1]) for line in saves.read_text().splitlines() if line.startswith("0 ")]
    assert num_computing == [0 if most_unkept_s > 2.0 else 1]


def test_restoring_goes_on_once_there_is_room_again(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store", slots=1) as engine:
        for agent in "ab":
            talk.turn(engine, agent, 300)
            assert engine.flush()
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
            assert min(talk.turn(engine, agent, 5) for agent in "aba") > 300
        assert talk.turn(engine, "b", 5) <= 5 + 64 + 20


def test_a_server_that_uses_nothing_of_what_it_restores_is_given_up_until_it_is_started_again(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three times in a row, however often a request says how much of its prompt was reused."""
    monkeypatch.setenv("IMITATION_USELESS", str(useless := tmp_path / "useless"))
    talk, gives_up = Talk(gguf, tmp_path / "log"), "uses nothing of the states that it restores"
    with front(gguf, tmp_path / "store", slots=1) as engine:
        talk.turn(engine, "a", 300)
        talk.turn(engine, "b", 300)
        useless.touch()
        assert min(talk.turn(engine, agent) for agent in "ab") > 300
        useless.unlink()
        assert talk.turn(engine, "a") <= 20 + 64
        useless.touch()
        assert min(talk.turn(engine, agent) for agent in "bab") > 300
        assert gives_up in caplog.text
        useless.unlink()
        assert talk.turn(engine, "a") > 300
        assert engine.flush()
        server_of().send_signal(signal.SIGKILL)
        time.sleep(0.2)
        until_answers(engine)
        assert max(talk.turn(engine, agent) for agent in "ab") <= 20 + 64
        engine.check()


def test_a_turn_is_kept_before_more_is_restored_over_it(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store", slots=1) as engine:
        talk.turn(engine, "a", 300)
        assert engine.flush()
        monkeypatch.setattr(keeping, "REST_S", 60.0)
        talk.turn(engine, "other", 100)
        beginning = np.array(talk.ids["a"][:100], np.uint32)
        engine.agent("b").generate(beginning, max_tokens=1, temperature=0)
        talk.turn(engine, "a")
    with front(gguf, tmp_path / "store") as engine:
        assert engine.num_warm_agents == 3


def test_what_cannot_be_restored_is_computed_in_an_empty_slot(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot has the same tokens of another namespace."""
    talk = Talk(gguf, tmp_path / "log")
    prompt = talk.more(300)
    with front(gguf, tmp_path / "store", slots=1) as engine:
        for namespace in ("one", "two"):
            engine.agent("a", namespace=namespace).generate(np.array(prompt, np.uint32), max_tokens=4)
            assert engine.flush()
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
            longer = np.array([*prompt, *talk.more(20)], np.uint32)
            report = engine.agent("a", namespace="one").generate(longer, max_tokens=1).report
        assert report.hot_tokens + report.warm_tokens == 0
        assert engine.agent("a", namespace="one").purge().hot_blocks_left == 0
        engine.check()


def test_windows_that_were_evicted_are_filled_again(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of windows are few, so that others take those of an agent while its blocks stay in memory."""
    monkeypatch.setenv("IMITATION_WINDOW", str(WINDOW))
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, "off", slots=1, hot_bytes=1 << 20) as engine:
        for _ in range(2):
            for agent in "abcdefgh":
                talk.turn(engine, agent, 200)
        engine.check()
        for agent in "hgf":
            assert talk.turn(engine, agent) <= 20 + 64


def test_an_agent_that_is_offloaded_comes_back_from_disk(gguf: Path, tmp_path: Path) -> None:
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store") as engine:
        talk.turn(engine, "a", 300)
        assert engine.agent("a").offload() == 5  # four blocks and the tail
        info = engine.agent("a").info()
        assert (info.hot_tokens, info.warm_tokens, info.saved_tokens) == (0, 256, 256)
        assert talk.turn(engine, "a") <= 20 + 64
        assert engine.agent("a").why()[0].warm_tokens == 256


def test_windows_of_whole_blocks_are_filled_again(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, of a turn that ends with a block, all of which are in memory."""
    monkeypatch.setenv("IMITATION_WINDOW", str(WINDOW))
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, "off", slots=1, hot_bytes=1 << 20) as engine:
        prompts = {agent: talk.more(320) for agent in "abcdefghijk"}
        for _ in range(2):
            for agent, prompt in prompts.items():
                engine.agent(agent).generate(np.array(prompt, np.uint32), max_tokens=1, temperature=0)
        talk.ids |= {agent: prompts[agent] for agent in "fe"}
        assert talk.turn(engine, "f") <= 20 + 64
        talk.turn(engine, "e")
        assert talk.turn(engine, "f") <= 20 + 64


def test_no_file_is_left(gguf: Path, tmp_path: Path) -> None:
    with front(gguf, tmp_path / "store") as engine:
        command = server_of().cmdline()
        folder = Path(command[command.index("--slot-save-path") + 1])
        Talk(gguf, tmp_path / "log").turn(engine, "a", 200)
        assert engine.flush() and folder.is_dir() and not list(folder.iterdir())
    assert not folder.exists()


def test_another_file_has_another_memory(gguf: Path, tmp_path: Path) -> None:
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store") as engine:
        talk.turn(engine, "a", 200)
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf.read_bytes() + bytes(32))
    with front(other, tmp_path / "store") as engine:
        assert engine.num_warm_agents == 0
    with front(gguf, tmp_path / "store") as engine:
        assert engine.num_warm_agents == 1


def test_another_adapter_and_another_rotation_have_another_memory(gguf: Path, tmp_path: Path) -> None:
    """The file of an adapter changes under its name; a model with LongRoPE turns all of a longer context otherwise."""
    talk, adapter, model = Talk(gguf, tmp_path / "log"), tmp_path / "adapter.gguf", tmp_path / "pocket.gguf"
    metadata, tensors = contents(pocket.model_dir(), model.stem, "f32")
    write_file(model, {**metadata, "llama.rope.scaling.original_context_length": 1024}, tensors)
    adapter.write_bytes(b"one")
    flags = f"--lora-scaled {adapter}:0.5"
    with front(model, tmp_path / "store", context=1024, more=flags) as engine:
        talk.turn(engine, "a", 200)
    with front(model, tmp_path / "store", context=2048, more=flags) as engine:
        assert engine.num_warm_agents == 0
    with front(model, tmp_path / "store", context=512, more=flags) as engine:
        assert engine.num_warm_agents == 1
    adapter.write_bytes(b"two")
    with front(model, tmp_path / "store", context=1024, more=flags) as engine:
        assert engine.num_warm_agents == 0


@pytest.mark.parametrize("version", ["3", "5"])
def test_slot_files_of_another_version_are_refused_once_and_the_front_goes_on(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    """What the known version had stored stays for it, and is not read meanwhile."""
    talk, refused = Talk(gguf, tmp_path / "log"), f"a slot file of version {version}, where only version 4 is known"
    with front(gguf, tmp_path / "store", slots=1) as engine:
        talk.turn(engine, "a", 200)
    with monkeypatch.context() as other:
        other.setenv("IMITATION_VERSION", version)
        with front(gguf, tmp_path / "store", slots=1) as engine:
            assert not engine.has_kv and engine.num_warm_agents == 0
            assert sum(refused in note for note in engine.notes) == 1
            assert talk.turn(engine, "a") > 200
            assert talk.turn(engine, "a") <= 20 + 1  # in its slot
            assert talk.turn(engine, "b", 100) == 100
            assert engine.health().ok and engine.flush()
            engine.check()
    assert [refused in each.message for each in caplog.records if each.levelname == "WARNING"] == [True]
    with front(gguf, tmp_path / "store", slots=1) as engine:
        assert engine.num_warm_agents == 1
        talk.ids["a"] = talk.ids["a"][: talk.ends["a"][0]]
        assert talk.turn(engine, "a") <= 20 + 64


def test_a_start_that_is_refused_leaves_no_folder(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "shared"
    place.mkdir()
    monkeypatch.setattr("rekindle_backends.assembly.RamDisk", partial(RamDisk, [place], least_free=0))
    with pytest.raises(RekindleError, match=re.escape("swa-full")):
        Engine(model=str(gguf), backend="llama.cpp", backend_flags="--swa-full", store=str(tmp_path / "store")).start()
    assert not list(place.iterdir())


def test_flags_in_variables_are_refused(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memories know flags alone: rows of another rotation would have the same one."""
    monkeypatch.setenv("LLAMA_ARG_ROPE_FREQ_SCALE", "0.5")
    with pytest.raises(RekindleError, match="LLAMA_ARG_ROPE_FREQ_SCALE"):
        Engine(model=str(gguf), backend="llama.cpp", store=str(tmp_path)).start()
