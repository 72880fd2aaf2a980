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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rekindle.config import Settings
from rekindle.errors import ConfigError
from rekindle.harness.client import HOST, ServerProcess, variables
from rekindle_lab.bench.memory import resident_bytes
from rekindle_lab.record import Measurement, Origin, deliver

NONE = "none"
KEYS = {"noisy": "key-of-the-noisy-one", "quiet": "key-of-the-quiet-one"}
QUESTION = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 1, "temperature": 0}
TIMEOUT_S = 120.0
LOOK_S = 0.02
SETTLE_S = 3.0
CHAT = "/v1/chat/completions"
COUNT = "/v1/messages/count_tokens"
HEADER = "x-anthropic-billing-header: "


# Bodies that a noisy tenant sends: expensive for a server, whether it accepts or refuses them.
#
# Every body is built once and sent unchanged. `fill` is the size in bytes of the largest bodies.


@dataclass(frozen=True, slots=True)
class Attack:
    """A body sent without a pause over `connections` at once; `reads` False: the answer is left unread."""

    path: str
    body: bytes
    connections: int = 1
    reads: bool = True


def attacks(fill: int) -> dict[str, Attack]:
    """Return every arm by name, except the one without an attack."""
    fits = fill // 128  # what a context of a few thousand tokens may hold: it is rendered and counted
    texts = {"words": "word ", "spaces": " ", "digits": "1", "control tokens": "<|im_end|>"}
    found = {name: _attack(CHAT, _chat(unit * (fill // len(unit)))) for name, unit in texts.items()}
    found |= {f"{name}, may fit": _attack(CHAT, _chat(unit * (fits // len(unit)))) for name, unit in texts.items()}
    many = {"messages": [{"role": "user", "content": "word"}] * 200_000}
    found["200,000 messages"] = _attack(CHAT, many)
    found["200,000 messages to count"] = _attack(COUNT, many)
    found["30,000 messages"] = _attack(CHAT, {"messages": [{"role": "user", "content": "word"}] * 30_000})
    for name, size in (("billing header", fill), ("billing header, may fit", fits)):
        system = {"role": "system", "content": HEADER + "a=b; " * (size // 5)}
        found[name] = _attack(CHAT, {"messages": [system, {"role": "user", "content": "Hi."}]})
    found["nested lists"] = Attack(CHAT, b'{"messages": [' + b"[[]],[]," * (fill // 8) + b"[]]}")
    found |= _dialects("word " * (fill // 5))
    found |= {f"{name}, may fit": attack for name, attack in _dialects("word " * (fits // 5)).items()}
    return found | _streams() | _constraints()


def _dialects(text: str) -> dict[str, Attack]:
    chat = _chat(text)
    bodies: Mapping[str, Any] = {
        "/v1/completions": {"prompt": text},
        "/v1/messages": chat,
        "/v1/responses": {"input": text},
        "/v1/tokenize": {"text": text},
        COUNT: chat,
    }
    return {path.removeprefix("/v1/"): _attack(path, body) for path, body in bodies.items()}


def _streams() -> dict[str, Attack]:
    """Return requests that are served, but more of them than can run at once."""
    endless = {**_chat("Count on."), "stream": True, "max_tokens": 2000, "ignore_eos": True}
    long = {**_chat("word " * 2_300), "max_tokens": 40, "ignore_eos": True}
    return {
        "60 unread streams": _attack(CHAT, endless, connections=60, reads=False),
        "100 long prompts": _attack(CHAT, long, connections=100),
    }


def _constraints() -> dict[str, Attack]:
    """Return constraints of a few bytes to a megabyte that are expensive to compile or to follow, or never compile."""
    patterns = {"type": "object", "patternProperties": {f"^a{at}[a-z]+$": {"type": "string"} for at in range(200)}}
    at_fault = {
        "type": "object",
        "properties": {
            **{f"p{at}": {"$ref": "#/$defs/d"} for at in range(100)},
            "last": {"type": "string", "pattern": "(?=x)y"},
        },
        "$defs": {"d": patterns},
    }
    doubling = "\n".join(["start: a0", *(f"a{at}: a{at + 1} a{at + 1}" for at in range(40)), 'a40: "x"'])
    ambiguous = " | ".join(f's s "a{at}"' for at in range(300))
    given: dict[str, dict[str, Any]] = {
        "schema at fault": {"json": at_fault},
        "8,000 properties": {"json": {"properties": {f"p{at}": {"type": "integer"} for at in range(8000)}}},
        "enum of 200,000": {"json": {"enum": list(range(200_000))}},
        "large divisor": {"json": {"type": "integer", "multipleOf": 99_999_989}},
        "regex that multiplies": {"regex": "((a{1000}){1000}){1000}"},
        "50,000 choices": {"choice": [f"c{at}x" for at in range(50_000)]},
        "grammar that doubles": {"grammar": doubling},
        "ambiguous grammar": {"grammar": f'start: s\ns: {ambiguous} | ""'},
    }
    chat = {**_chat("Hi."), "max_tokens": 20}
    return {name: _attack(CHAT, {**chat, "structured_outputs": each}) for name, each in given.items()}


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _attack(path: str, body: Mapping[str, Any], *, connections: int = 1, reads: bool = True) -> Attack:
    data = body if path != "/v1/messages" else {"max_tokens": 1, **body}
    return Attack(path, json.dumps(data).encode(), connections, reads)


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
