"""`rekindle bench noisy [MODEL]`: what a tenant that sends the worst possible bodies costs another tenant.

    rekindle bench noisy --seconds 10 --mebibytes 32 --only words --only "100 long prompts"

Every arm starts a real server with two tenants. One tenant sends its body over and over without a pause, whatever the
answers; the other requests one token at a time, each after its last answer. Measured: the time of these requests and
of the server's health check, and the memory of the server's process before, at most, and after the noise. The arm
`none` is the quiet tenant alone.

Requests are sent by `http.client`, in one call that lets the quiet tenant's thread run: `httpx` copies what is left of
a body after each send, and that is time of the process that measures.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rekindle.config import Settings
from rekindle.errors import ConfigError
from rekindle.harness.client import HOST, ServerProcess, variables
from rekindle.harness.record import Measurement, Origin, deliver
from rekindle_lab.bench.memory import resident_bytes
from rekindle_lab.bench.server.noisy_bodies import CHAT, Attack, attacks

NONE = "none"
KEYS = {"noisy": "key-of-the-noisy-one", "quiet": "key-of-the-quiet-one"}
QUESTION = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 1, "temperature": 0}
TIMEOUT_S = 120.0
LOOK_S = 0.02
SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class NoisyBench:
    """Duration of each arm, size of bodies, and which arms to run (None: all)."""

    seconds: float = 10.0
    mebibytes: float = 32.0
    only: tuple[str, ...] | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not self.mebibytes > 0:
            raise ConfigError("--seconds and --mebibytes must be above 0")
        unknown = sorted({*(self.only or ())} - {NONE, *attacks(1 << 10)})
        if unknown:
            raise ConfigError(f"--only: no arm {unknown[0]!r}; there are {', '.join((NONE, *attacks(1 << 10)))}")

    @property
    def fill(self) -> int:
        """Bytes of text in a large body, which is a little larger."""
        return int(self.mebibytes * (1 << 20)) - 1024


@dataclass(slots=True)
class Noticed:
    """Observations of one arm: seconds of the quiet tenant's answers and of health checks, bytes of the process."""

    waits: list[float] = field(default_factory=list)
    signs: list[float] = field(default_factory=list)
    answers: Counter[int] = field(default_factory=Counter)  # to the noisy tenant, by status; 0: none
    before_bytes: int = 0
    most_bytes: int = 0
    after_bytes: int = 0


def run_noisy(settings: Settings, options: NoisyBench, console: Console) -> int:
    """Run the arms, print the table, write JSON lines; return 0."""
    arms: dict[str, Attack | None] = {NONE: None, **attacks(options.fill)}
    wanted = {NONE, *(options.only or arms)}
    found: dict[str, Noticed] = {}
    with console.status("starting") as status:
        for name, attack in arms.items():
            if name in wanted:
                status.update(name)
                found[name] = _arm(settings, attack, options.seconds)
    console.print(table(found))
    origin = Origin.here("noisy", {**asdict(options), "out": None})
    deliver([line for name, noticed in found.items() for line in lines(name, noticed)], origin, options.out, console)
    return 0


def table(found: dict[str, Noticed]) -> Table:
    """Build the table: waits compared with the quiet tenant alone; memory before, at most, and after."""
    alone = statistics.median(found[NONE].waits)
    shown = Table("noise", "wait", "longest", "more than alone", "sign of life", "memory MB", "answers")
    for name, noticed in found.items():
        median = statistics.median(noticed.waits)
        sizes = (noticed.before_bytes, noticed.most_bytes, noticed.after_bytes)
        shown.add_row(
            name,
            f"{median:.3f} s",
            f"{max(noticed.waits):.2f} s",
            f"{median - alone:+.3f} s",
            f"{max(noticed.signs):.2f} s",
            ", ".join(f"{size / 1e6:,.0f}" for size in sizes),
            " ".join(f"{num}x{status or 'none'}" for status, num in sorted(noticed.answers.items())),
        )
    return shown


def lines(name: str, noticed: Noticed) -> Iterator[Measurement]:
    """Yield the measures of one arm."""
    detail = {"answers": {str(status): num for status, num in noticed.answers.items()}}
    yield Measurement("wait", name, "s", tuple(noticed.waits), detail)
    yield Measurement("sign of life", name, "s", tuple(noticed.signs))
    sizes = {"before": noticed.before_bytes, "most": noticed.most_bytes, "after": noticed.after_bytes}
    yield Measurement("memory", name, "bytes", tuple(map(float, sizes.values())), {"when": list(sizes)})


def _arm(settings: Settings, attack: Attack | None, seconds: float) -> Noticed:
    with tempfile.TemporaryDirectory(prefix="rekindle-noisy-") as scratch:
        given = variables(settings, Path(scratch) / "store")
        given["api_keys"] = ",".join(f"{name}={key}" for name, key in KEYS.items())
        with ServerProcess(log=Path(scratch) / "log", variables=given) as process:
            process.wait_ready()
            noticed = _measured(process, attack, seconds)
            process.kill()
            return noticed


def _measured(process: ServerProcess, attack: Attack | None, seconds: float) -> Noticed:
    noticed, port = Noticed(), process.port
    question = json.dumps(QUESTION).encode()

    def ask() -> None:
        began = time.perf_counter()
        _send(port, "POST", CHAT, question, key=KEYS["quiet"])
        noticed.waits.append(time.perf_counter() - began)

    def live() -> None:
        began = time.perf_counter()
        _send(port, "GET", "/health/live", None, key=None)
        noticed.signs.append(time.perf_counter() - began)
        time.sleep(LOOK_S)

    def look() -> None:
        noticed.most_bytes = max(noticed.most_bytes, resident_bytes(process.pid))
        time.sleep(LOOK_S)

    def shout() -> None:
        assert attack is not None
        noticed.answers[_send(port, "POST", attack.path, attack.body, key=KEYS["noisy"], reads=attack.reads)] += 1

    for _ in range(5):
        ask()
    noticed.waits.clear()
    noticed.before_bytes = noticed.most_bytes = resident_bytes(process.pid)
    noise = [] if attack is None else [shout] * attack.connections
    with _looping([look, live, *noise]) as ended:
        time.sleep(min(1.0, seconds / 4) if noise else 0.0)
        until = time.monotonic() + seconds
        while time.monotonic() < until or not noticed.waits:
            ask()
        ended.set()
    time.sleep(SETTLE_S)
    noticed.after_bytes = resident_bytes(process.pid)
    return noticed


@contextmanager
def _looping(works: list[Callable[[], None]]) -> Iterator[threading.Event]:
    """Run each of these repeatedly in its own thread until the event is set."""
    ended = threading.Event()

    def run(work: Callable[[], None]) -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                work()

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield ended
    finally:
        ended.set()
        for thread in threads:
            thread.join(LOOK_S)


def _send(port: int, method: str, path: str, body: bytes | None, *, key: str | None, reads: bool = True) -> int:
    """Return the status of an answer, read to its end or left unread until the timeout; 0 if none came."""
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        if not reads:
            time.sleep(TIMEOUT_S)
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
