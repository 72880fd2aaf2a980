"""A rolling restart under load: nothing is refused, broken or different, and what agents remember stays warm."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rekindle.config import ENV_PREFIX, ServerSettings
from rekindle.config.key_file import add_key
from rekindle.errors import ConfigError
from rekindle.harness.client import Client
from rekindle.server.listening import taken

WAIT_S = 150.0
AGENTS = ("ada", "bo", "cy")
SHORT = 12
LONG: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}  # one of these streams runs whenever something happens
# As systemd does it: the number of the process is that of the program, which it becomes.
ACTIVATED = """
import os, sys
os.dup2(int(os.environ["SOCKET"]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def said(agent: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{agent} keeps the copper key in the attic, next to the lamp. " * 6}]


@dataclass
class Service:
    """What systemd has of a service with a socket: the socket, where states are sent, and the command."""

    folder: Path
    listener: socket.socket
    states: socket.socket
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "log"

    @property
    def port(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port

    def start(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        environment |= {"NOTIFY_SOCKET": self.states.getsockname(), "SOCKET": str(self.listener.fileno())}
        command = ["-m", "rekindle.cli", "serve", "--config", str(self.folder / "config.toml")]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", ACTIVATED, *command],
                env=environment,
                pass_fds=[self.listener.fileno()],
                stdout=log,
                stderr=log,
            )

    def process(self, key: str = "") -> int:
        """The process that answers."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)) as connection:
            connection.request("GET", "/health/ready", headers={"X-API-Key": key})
            found: int = json.load(connection.getresponse())["process"]
            return found

    def until_logged(self, text: str) -> None:
        until(lambda: text in self.log.read_text(), lambda: self.log.read_text()[-3000:])


def until(holds: Callable[[], bool], why: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


def has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


@dataclass
class Load:
    """Clients that send all the time: what each was answered, and what failed."""

    port: int
    expected: dict[str, list[int]]
    failures: list[str] = field(default_factory=list)
    num_answers: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self, ask: Callable[[str], list[int]], agent: str, num_tokens: int) -> None:
        while not self._over.is_set():
            try:
                ids = ask(agent)
            except Exception as error:  # of any kind: the test wants none
                self.failures.append(f"{agent}: {error!r}")
                return
            if ids != self.expected[agent][:num_tokens]:
                self.failures.append(f"{agent}: another reply")
            self.num_answers += 1
            time.sleep(0.25)  # the next process has to load meanwhile

    def streaming(self) -> Callable[[str], list[int]]:
        client = Client(self.port)  # one connection, which stays open
        return lambda agent: client.chat(said(agent), agent=f"s-{agent}", **LONG).completion_ids

    def whole(self, *, stays: bool) -> Callable[[str], list[int]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)

        def ask(agent: str) -> list[int]:
            body = {
                "messages": said(agent),
                "temperature": 0,
                "max_tokens": SHORT,
                "ignore_eos": True,
                "rekindle": {"return_ids": True},
            }
            headers = {"X-Agent-ID": f"w-{agent}"} | ({} if stays else {"Connection": "close"})
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            found = json.load(answer)
            assert answer.status == 200, found
            ids: list[int] = found["rekindle"]["completion_ids"]
            return ids

        return ask

    @contextmanager
    def sent(self) -> Iterator[None]:
        threads = [
            threading.Thread(target=self.run, args=(ask, agent, num_tokens))
            for ask, agent, num_tokens in (
                (self.streaming(), "ada", LONG["max_tokens"]),
                (self.streaming(), "bo", LONG["max_tokens"]),
                (self.whole(stays=True), "cy", SHORT),
                (self.whole(stays=False), "ada", SHORT),
            )
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def more(self, count: int) -> None:
        """Wait for so many more answers."""
        wanted = self.num_answers + count
        until(lambda: self.num_answers >= wanted or bool(self.failures))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    address = f"/tmp/rekindle-{os.getpid()}-states"  # a longer path would be too long for a socket
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as states:
        states.bind(address)
        states.settimeout(WAIT_S)
        yield Service(tmp_path, listener, states)
        os.unlink(address)


def test_a_rolling_restart_under_load_refuses_breaks_and_changes_nothing(service: Service) -> None:
    config = service.folder / "config.toml"
    sound = f"store = '{service.folder / 'store'}'\nslot = 'auto'\nthreads = 1\nhot_bytes = '64MiB'\nopen = true\n"
    config.write_text(sound)
    first, second, third = service.start(), 0, None
    try:
        expected = {name: Client(service.port).chat(said(name), **LONG).completion_ids for name in AGENTS}
        assert service.states.recv(64) == b"READY=1"
        load = Load(service.port, expected)
        with load.sent():
            load.more(8)
            config.write_text(sound + "no_setting = 1\n")
            first.send_signal(signal.SIGUSR2)
            service.until_logged("ended with 2 before it had loaded: this one serves as before")
            load.more(4)
            assert service.process() == first.pid and not load.failures

            config.write_text(sound)
            first.send_signal(signal.SIGUSR2)
            state = service.states.recv(64).decode()
            assert state.startswith("MAINPID=")
            second = int(state.removeprefix("MAINPID="))
            assert first.wait(WAIT_S) == 0
            load.more(12)
        assert load.failures == []
        assert service.process() == second != first.pid
        assert service.states.recv(64) == b"READY=1"
        for name in ("s-ada", "w-cy"):
            again = Client(service.port).chat(said(name[2:]), agent=name, max_tokens=SHORT, ignore_eos=True)
            assert again.report["outcome"] == "exact" and again.report["computed_tokens"] == 1
            assert again.completion_ids == expected[name[2:]][:SHORT]
        assert [path.name for path in (service.folder / "store").glob("slot-*")] == ["slot-0"]

        os.kill(second, signal.SIGTERM)  # as `systemctl restart` does, which keeps the socket
        until(lambda: has_ended(second))
        second = 0
        config.write_text(f"{sound}key_file = '{service.folder / 'keys.toml'}'\n")
        _, key = add_key(service.folder / "keys.toml", "default", is_admin=False, now=datetime.now(UTC))
        third = service.start()
        assert service.process(key) == third.pid
        third.send_signal(signal.SIGHUP)  # which ends a process that does not read keys again
        reply = Client(service.port, api_key=key).chat(said("ada"), agent="s-ada", max_tokens=SHORT)
        assert reply.report["warm_tokens"] == reply.report["prompt_tokens"] - 1
    finally:
        for process in (first, third):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        if second:
            os.kill(second, signal.SIGKILL)


def test_sockets_that_others_reach_need_a_key_and_what_does_not_listen_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as wide:
        with pytest.raises(ConfigError, match=r"listens on 0\.0\.0\.0, which can be reached by others: set api_key"):
            taken([os.dup(wide.fileno())], ServerSettings())
        (listener,) = taken([os.dup(wide.fileno())], ServerSettings(api_key="a-key"))
        assert not listener.get_inheritable()
        listener.close()
    with socket.socket() as idle, pytest.raises(ConfigError, match="does not listen for TCP"):
        taken([os.dup(idle.fileno())], ServerSettings())
    with (tmp_path / "file").open("wb") as file, pytest.raises(ConfigError, match="passed to this process: "):
        taken([file.fileno()], ServerSettings())
