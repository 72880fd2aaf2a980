"""A llama-server that runs already and whose folder of slot files is given: what its slots compute is kept, too."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from rekindle import Engine
from rekindle.errors import BackendFailed, ConfigError, RekindleError
from rekindle.harness.own_server import free_url, place_of
from rekindle_backends.client import Address, Backend
from rekindle_backends.llama import joined
from rekindle_backends.llama.gaps import Gaps
from rekindle_backends.llama.joined import JoinedServer
from rekindle_backends.llama.slot_folder import GivenFolder
from rekindle_backends.llama.wire import COMPLETION, EventReader, completion_body
from rekindle_backends.wire import Call
from tests.backends.llama import imitation
from tests.backends.llama.imitation import WINDOW
from tests.backends.llama.test_slot_memory import Talk

ANSWERS_WITHIN_S = 60.0
LOOK_EVERY_S = 0.1


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "LOOK_EVERY_S", LOOK_EVERY_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "slots"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture
def url() -> str:
    return free_url()


@contextmanager
def running(gguf: Path, url: str, folder: Path, *more: str, **variables: str) -> Iterator[None]:
    """The imitation at a URL, with two slots unless `more` flags say otherwise."""
    flags = ["-m", str(gguf), *place_of(url), "-np", "2", "-c", "4096", "--slot-save-path", str(folder), *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    with subprocess.Popen([sys.executable, "-m", imitation.__name__, *flags], env=environment) as process:
        end = time.monotonic() + ANSWERS_WITHIN_S
        while True:
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.05)
        try:
            yield
        finally:
            process.kill()


def front(gguf: Path, url: str, folder: Path, store: Path | str) -> Engine:
    """A front of the llama-server there, to be started."""
    return Engine(
        model=str(gguf),
        backend=f"llama.cpp={url}",
        backend_slots=str(folder),
        store=str(store),
        hot_bytes=16 << 20,
    )


def test_its_memories_outlast_a_front_that_alone_has_its_folder(
    gguf: Path, url: str, folder: Path, tmp_path: Path
) -> None:
    log, left = tmp_path / "log", folder / "rekindle-slots-7.bin"
    left.write_bytes(b"a conversation")
    talk = Talk(gguf, log)
    with running(gguf, url, folder, IMITATION_LOG=str(log)):
        with front(gguf, url, folder, tmp_path / "store") as engine:
            assert not left.exists() and "its slots are kept" in " ".join(engine.notes)
            for agent in "abcabc":
                talk.turn(engine, agent, 100)
            with (
                pytest.raises(ConfigError, match=r"another server uses .*slots: a llama-server has one front"),
                front(gguf, url, folder, "off"),
            ):
                raise AssertionError("two fronts have one folder")
        assert [each.name for each in folder.iterdir()] == ["rekindle-slots-lock"]
        with front(gguf, url, folder, tmp_path / "store") as engine:
            assert all(talk.turn(engine, agent, 20) <= 20 + 64 for agent in "abc")


def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait until a message with this text was logged."""
    end = time.monotonic() + ANSWERS_WITHIN_S
    while text not in caplog.text:
        assert time.monotonic() < end, caplog.text
        time.sleep(0.05)


def test_one_that_is_started_again_gets_its_memories_back(
    gguf: Path, url: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, talk = tmp_path / "log", Talk(gguf, tmp_path / "log")
    with running(gguf, url, folder, IMITATION_LOG=str(log)):
        engine = front(gguf, url, folder, tmp_path / "store")
        engine.start()
        talk.turn(engine, "a", 200)
        engine.flush()
    with engine, running(gguf, url, folder, IMITATION_LOG=str(log)):
        until_logged(caplog, "was started again: its slots are empty")
        assert talk.turn(engine, "a", 20) <= 20 + 64


def test_one_that_comes_back_with_other_flags_gets_none(
    gguf: Path, url: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = np.array(Talk(gguf, tmp_path / "log").more(200), np.uint32)
    with running(gguf, url, folder):
        engine = front(gguf, url, folder, "off")
        engine.start()
        engine.agent("a").generate(prompt, max_tokens=4)
        engine.flush()
    with engine, running(gguf, url, folder, IMITATION_FLAGS="--rope-freq-base 20000"):
        until_logged(caplog, "computes other rows now")
        for agent in "bc":  # in both slots: what is reused was computed with these flags
            report = engine.agent(agent).generate(prompt[:150], max_tokens=4).report
            assert report.hot_tokens + report.warm_tokens in (0, 149)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("-np", "3", "-c", "6144"), "it has 3 slots and had 2: restart this server"),
        (("-np", "1", "-c", "2048"), "it has 1 slots and had 2: restart this server"),
        (("--kv-unified",), "its slots have one cache now or had one before"),
    ],
)
def test_one_that_comes_back_with_other_slots_is_refused_and_health_says_so(
    gguf: Path,
    url: str,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    more: tuple[str, ...],
    says: str,
) -> None:
    """It would abort on files for the slots that it had. Once it is as it was, all is well again."""
    talk = Talk(gguf, tmp_path / "log")
    with running(gguf, url, folder, IMITATION_LOG=str(tmp_path / "log")):
        engine = front(gguf, url, folder, tmp_path / "store")
        engine.start()
        talk.turn(engine, "a", 200)
        engine.flush()
    with engine:
        with running(gguf, url, folder, *more):
            until_logged(caplog, says)
            health = engine.health()
            assert says in " ".join(health.problems) and not health.computes
            with suppress(RekindleError):  # there may be no such slot any more
                engine.agent("b").generate(np.array(talk.more(100), np.uint32), max_tokens=1)
            assert says in " ".join(engine.health().problems)
        with running(gguf, url, folder, IMITATION_LOG=str(tmp_path / "log")):
            until_logged(caplog, "was started again: its slots are empty")
            assert talk.turn(engine, "a", 20) <= 20 + 64
            assert says not in " ".join(engine.health().problems)


@contextmanager
def computing(backend: Backend) -> Iterator[None]:
    """While a reply is computed in the second slot."""
    began, has_left = threading.Event(), threading.Event()
    body = completion_body([300] * 20, {"n_predict": 10_000, "temperature": 0, "id_slot": 1, "seed": 0})
    call = Call(COMPLETION, body, {}, EventReader(Gaps(()), 20).read)
    sending = backend.submit(call, lambda arrived: began.set(), left=has_left.set)
    assert began.wait(ANSWERS_WITHIN_S)
    yield
    sending.cancel()
    assert has_left.wait(ANSWERS_WITHIN_S)


@pytest.mark.parametrize("beside", ["same", "drawn"])
def test_one_that_computes_is_compared_once_it_rests(
    gguf: Path, url: str, folder: Path, tmp_path: Path, beside: str
) -> None:
    """Rows that are computed beside others may be other ones each time, or the same wrong ones twice."""
    word = tmp_path / "word"
    word.write_text("<__media_the_first_process__>")
    variables = {"IMITATION_WORD": str(word), "IMITATION_BESIDE": beside, "IMITATION_ENDS": "0"}
    backend = Backend(Address(url, None, ANSWERS_WITHIN_S))
    backend.start()
    with running(gguf, url, folder, IMITATION_TOKEN_S="0.05", **variables), closing(GivenFolder(folder)) as files:
        server = JoinedServer(backend, files, 2)
        backend.run(server.join()).result()
        backend.run(server.check()).result()
        word.write_text("<__media_the_second_process__>")
        with computing(backend):
            for _ in range(3):
                with pytest.raises(BackendFailed, match="compared once it has nothing to do"):
                    backend.run(server.check()).result()
        end = time.monotonic() + ANSWERS_WITHIN_S
        while not has_the_rows(backend, server):
            assert time.monotonic() < end
        assert server.num_starts == 1 and backend.problem() is None
    backend.stop()


def has_the_rows(backend: Backend, server: JoinedServer) -> bool:
    """Whether it has the rows that were probed, as far as can be said."""
    try:
        backend.run(server.check()).result()
    except BackendFailed:
        return False
    return True


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"IMITATION_WORD": "<__media__>"}, "does not say which of its processes answers"),
        ({"IMITATION_WINDOW": str(WINDOW)}, "windows: start it here"),
    ],
)
def test_why_nothing_is_kept(gguf: Path, url: str, folder: Path, variables: dict[str, str], says: str) -> None:
    # a reply that is drawn may end at once, and this one shall have words
    with running(gguf, url, folder, IMITATION_ENDS="0", **variables), front(gguf, url, folder, "off") as engine:
        assert says in " ".join(engine.notes)
        assert engine.agent("a").generate(np.array([300] * 20, np.uint32), max_tokens=2).token_ids


def test_a_folder_that_is_not_the_servers(gguf: Path, url: str, folder: Path, tmp_path: Path) -> None:
    with running(gguf, url, folder):
        with front(gguf, url, tmp_path, "off") as engine:
            assert "saved no file" in " ".join(engine.notes)
        with pytest.raises(ConfigError, match=r"missing cannot be used: No such file"):
            front(gguf, url, tmp_path / "missing", "off").start()
    with pytest.raises(ConfigError, match="backend_slots: this is for a llama-server that runs already"):
        Engine(model=str(gguf), backend="llama.cpp", backend_slots=str(folder))
