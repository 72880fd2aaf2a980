"""`rekindle bench noisy [MODEL]`: what a tenant that sends the worst possible bodies costs another tenant.

    rekindle bench noisy --seconds 10 --mebibytes 32 --only words --only "100 long prompts"

Every arm starts a real server with two tenants. One requests one token at a time, each after its last answer: first
alone, which says what the machine itself makes it wait, then while the other sends its body over and over without a
pause, whatever the answers. Measured: the time of the quiet one's requests and of the server's health check, the
processor time that the server took meanwhile, and the memory of its process before, at most, and after the noise.

The server's processor time during a wait is about what the wait would be on a core that nothing else uses: on a
machine with other work it says what of a wait is the server's own. Processes that try constraints are not in it.

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
from http import HTTPStatus
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rekindle.config import Settings
from rekindle.errors import ConfigError
from rekindle.harness.client import HOST, ServerProcess, variables
from rekindle_lab.bench.memory import processor_seconds, resident_bytes
from rekindle_lab.bench.server.attacks import CHAT, Attack, attacks
from rekindle_lab.record import Measurement, Origin, deliver

KEYS = {"noisy": "key-of-the-noisy-one", "quiet": "key-of-the-quiet-one"}
QUESTION = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 1, "temperature": 0}
TIMEOUT_S = 120.0
LOOK_S = 0.02
SETTLE_S = 3.0
WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class NoisyBench:
    """Seconds of each arm's two halves, size of bodies, and which arms to run (None: all)."""

    seconds: float = 10.0
    mebibytes: float = 32.0
    only: tuple[str, ...] | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not self.mebibytes > 0:
            raise ConfigError("--seconds and --mebibytes must be above 0")
        unknown = sorted({*(self.only or ())} - {*attacks(1 << 10)})
        if unknown:
            raise ConfigError(f"--only: no arm {unknown[0]!r}; there are {', '.join(attacks(1 << 10))}")

    @property
    def fill(self) -> int:
        """Bytes of text in a large body, which is a little larger."""
        return int(self.mebibytes * (1 << 20)) - 1024


@dataclass(slots=True)
class Noticed:
    """Observations of one arm: seconds of the quiet tenant's answers and of health checks, bytes of the process."""

    alone: list[float] = field(default_factory=list)  # before the noise
    waits: list[float] = field(default_factory=list)
    work_alone: list[float] = field(default_factory=list)  # processor time of the server during these waits
    work: list[float] = field(default_factory=list)
    signs: list[float] = field(default_factory=list)
    answers: Counter[int] = field(default_factory=Counter)  # to the noisy tenant, by status; 0: none
    refused: int = 0  # answers to the quiet one that were none
    before_bytes: int = 0
    most_bytes: int = 0
    after_bytes: int = 0


def run_noisy(settings: Settings, options: NoisyBench, console: Console) -> int:
    """Run the arms, print the table; JSON lines are written after each arm; return 0."""
    found: dict[str, Noticed] = {}
    origin = Origin.here("noisy", {**asdict(options), "out": None})
    with console.status("starting") as status:
        for name, attack in attacks(options.fill).items():
            if options.only is None or name in options.only:
                status.update(name)
                found[name] = _arm(settings, attack, options.seconds)
                deliver([*lines(name, found[name])], origin, options.out, console)
    console.print(table(found))
    return 0


def table(found: dict[str, Noticed]) -> Table:
    """Build the table: waits, median and longest, alone and with the noise; memory before, at most, and after."""
    waits = ("alone", "longest", "wait", "longest", "more than alone", "of the server, longest", "refused")
    shown = Table("noise", *waits, "sign of life", "memory MB", "answers")
    for name, noticed in found.items():
        alone, median = statistics.median(noticed.alone), statistics.median(noticed.waits)
        sizes = (noticed.before_bytes, noticed.most_bytes, noticed.after_bytes)
        shown.add_row(
            name,
            f"{alone:.3f} s",
            f"{max(noticed.alone):.2f} s",
            f"{median:.3f} s",
            f"{max(noticed.waits):.2f} s",
            f"{median - alone:+.3f} s",
            f"{max(noticed.work):.2f} s" if noticed.work else "",
            f"{noticed.refused}",
            f"{max(noticed.signs):.2f} s",
            ", ".join(f"{size / 1e6:,.0f}" for size in sizes),
            " ".join(f"{num}x{status or 'none'}" for status, num in sorted(noticed.answers.items())),
        )
    return shown


def lines(name: str, noticed: Noticed) -> Iterator[Measurement]:
    """Yield the measures of one attack."""
    answers = {str(status): num for status, num in noticed.answers.items()}
    detail = {"answers": answers, "refused": noticed.refused}
    yield Measurement(name, "wait alone", "s", tuple(noticed.alone))
    yield Measurement(name, "wait", "s", tuple(noticed.waits), detail)
    for arm, work in (("of it the server, alone", noticed.work_alone), ("of it the server", noticed.work)):
        if work:
            yield Measurement(name, arm, "s", tuple(work))
    yield Measurement(name, "sign of life", "s", tuple(noticed.signs))
    sizes = {"before": noticed.before_bytes, "after": noticed.after_bytes}
    yield Measurement(name, "more memory", "MiB", ((noticed.most_bytes - noticed.before_bytes) / 2**20,), sizes)


def _arm(settings: Settings, attack: Attack, seconds: float) -> Noticed:
    with tempfile.TemporaryDirectory(prefix="rekindle-noisy-") as scratch:
        given = variables(settings, Path(scratch) / "store")
        given["api_keys"] = ",".join(f"{name}={key}" for name, key in KEYS.items())
        with ServerProcess(log=Path(scratch) / "log", variables=given) as process:
            process.wait_ready()
            noticed = _measured(process, attack, seconds)
            process.kill()
            return noticed


def _measured(process: ServerProcess, attack: Attack, seconds: float) -> Noticed:
    noticed, port = Noticed(), process.port
    question = json.dumps(QUESTION).encode()

    def ask(waits: list[float], work: list[float], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not waits or time.monotonic() < until:
            began, worked = time.perf_counter(), processor_seconds(process.pid)
            noticed.refused += _send(port, "POST", CHAT, question, key=KEYS["quiet"]) != HTTPStatus.OK
            waits.append(time.perf_counter() - began)
            if worked is not None:
                work.append((processor_seconds(process.pid) or worked) - worked)

    def live() -> None:
        began = time.perf_counter()
        _send(port, "GET", "/health/live", None, key=None)
        noticed.signs.append(time.perf_counter() - began)
        time.sleep(LOOK_S)

    def look() -> None:
        noticed.most_bytes = max(noticed.most_bytes, resident_bytes(process.pid))
        time.sleep(LOOK_S)

    def shout() -> None:
        how = {"reads": attack.reads, "is_chunked": attack.is_chunked}
        noticed.answers[_send(port, "POST", attack.path, attack.body, key=KEYS["noisy"], **how)] += 1

    ask([], [], WARM_UP_S)
    with _looping([live]) as ended:
        ask(noticed.alone, noticed.work_alone, seconds)
        ended.set()
    noticed.signs.clear()
    noticed.before_bytes = noticed.most_bytes = resident_bytes(process.pid)
    with _looping([look, live, *[shout] * attack.connections]) as ended:
        time.sleep(min(1.0, seconds / 4))
        ask(noticed.waits, noticed.work, seconds)
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


def _send(
    port: int,
    method: str,
    path: str,
    body: bytes | None,
    *,
    key: str | None,
    reads: bool = True,
    is_chunked: bool = False,
) -> int:
    """Return the status of an answer, read to its end or left unread until the timeout; 0 if none came."""
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    if is_chunked:  # so that http.client sends the body as it is
        headers["Transfer-Encoding"] = "chunked"
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
