"""A process that may have few files open, and clients that take all of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

from rekindle.harness.client import free_port

CONFINED = (
    "import resource, os, sys; resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:3]))); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[3:]])"
)
FEW_FILES = 64
NUM_IDLE = 80
WAIT_S = 120.0  # nothing here is timed; this bounds a failure


def confined(*command: str, soft: int = FEW_FILES, hard: int = FEW_FILES) -> list[str]:
    """A command line that runs Python with `command` and these limits of open files."""
    return [sys.executable, "-c", CONFINED, str(soft), str(hard), *command]


def status(port: int, timeout_s: float = 5.0) -> int | None:
    """What the server says to be; None where it says nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", "/health/live")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def until_answered(port: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while status(port) != 200:
        assert time.monotonic() < deadline, "nobody is answered"
        time.sleep(0.05)


def test_idle_clients_that_take_every_descriptor_neither_fill_the_log_nor_keep_others_out(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    serve = ["-m", "rekindle.cli", "serve", "--store", str(tmp_path / "store"), "--threads", "1", "--port", str(port)]
    command = confined(*serve, "--hot-bytes", "16MiB", "--read-timeout-s", "600")
    with log.open("wb") as sink, subprocess.Popen(command, stdout=sink, stderr=sink) as process:
        try:
            until_answered(port)
            with contextlib.ExitStack() as stack:
                for _ in range(NUM_IDLE):
                    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
                    stack.enter_context(contextlib.closing(connection))
                until_answered(port)  # idle connections give way
                assert process.poll() is None
            until_answered(port)
            assert log.stat().st_size < 4096, log.read_text()[:4096]
        finally:
            process.terminate()
    assert process.returncode == 0, log.read_text()[-4096:]


ACCEPT = """
import json, logging, os, socket
from rekindle.server.descriptors import Listener

logging.basicConfig(format="%(message)s")
now, waiting, files = 0.0, [], []
listening = socket.create_server(("127.0.0.1", 0), backlog=200)
listening.setblocking(False)
clients = [socket.create_connection(listening.getsockname()) for _ in range(15)]
make_room = lambda: bool(waiting) and (waiting.pop(0).close() or True)
listener = Listener(listening, make_room=make_room, clock=lambda: now)
while True:
    try:
        files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        break
os.close(files.pop())
os.close(files.pop())

def accepted(times):
    found = []
    for _ in range(times):
        try:
            found.append(listener.accept()[0])
        except BlockingIOError:
            pass
    return found

held = accepted(5)  # two are accepted, three are closed
now = 59.0
waiting = held[:1]
later = accepted(2)  # the first gives way to the sixth
now = 60.0
accepted(20)
closed = [at for at, client in enumerate(clients) if client.setblocking(False) or is_closed(client)]
print(json.dumps({"held": len(held), "later": len(later), "closed": closed}))
"""
IS_CLOSED = """
def is_closed(client):
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
"""


def test_a_connection_without_a_descriptor_is_closed_and_said_once_a_minute() -> None:
    done = subprocess.run(confined("-c", IS_CLOSED + ACCEPT), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"held": 2, "later": 1, "closed": [0, *range(2, 5), *range(6, 15)]}
    assert done.stderr.splitlines() == [
        "Too many open files (ulimit -n): idle or new connections are closed; so far 1",
        "Too many open files (ulimit -n): idle or new connections are closed; so far 5",
    ]


def test_the_limit_is_raised_where_that_is_allowed_and_connections_fit_under_it() -> None:
    program = (
        "from rekindle.server import descriptors as d; print(d.raise_limit(), d.places(50, lingering=5, store_files=0),"
        " d.places(10_000, lingering=5, store_files=10**9), d.places(3, lingering=5, store_files=10**9))"
    )
    done = subprocess.run(confined("-c", program, soft=100, hard=400), capture_output=True, text=True, check=True)
    limit, few, many, least = map(int, done.stdout.split())
    assert (limit, few, least) == (400, 50, 3)
    assert 8 <= many <= 400 - 100 - 5 - 32 - 64
    assert f"max_connections is {many}, not 10000: this process may have 400 files open" in done.stderr
