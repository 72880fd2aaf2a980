"""More agents than slots of a llama-server: what a turn computes, takes and writes with Rekindle in front, and without.

Both arms get the same token ids, at temperature 0. The plain llama-server has its own cache of states in memory, as it
does by itself. Between rounds either is killed: llama-server, and with Rekindle in front that too.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from rekindle.config import ServerSettings
from rekindle.errors import ConfigError, RequestFailed
from rekindle.harness.client import ServerProcess, free_port
from rekindle_backends.llama.command import PROGRAM, program
from rekindle_backends.llama.layout import BLOCK_TOKENS

SYSTEM = "You are one of several helpers that look after the harbour of Ilmen. " * 9
READY_S = 300.0
LONG_TURNS, LONG_NEW, LONG_REPLY = 9, 100, 16  # on a long history: turns, tokens of each that are new and of its reply
WRITTEN = "rekindle_disk_written_bytes_total "


@dataclass(frozen=True, slots=True)
class SlotsBench:
    """What is measured: `agents` on `slots` of a llama-server of this `model`, with more of its flags.

    Replies begin with so many tokens of `reasoning`, which later prompts leave out, as they do what opens it.
    """

    model: Path
    agents: int = 10
    slots: int = 4
    context: int = 2048
    reply: int = 12
    flags: str = "-t 1"
    lengths: tuple[int, ...] = ()
    hot_bytes: str | None = None
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: the ids of its reply, prompt tokens that were computed, and seconds in all."""

    ids: tuple[int, ...]
    computed: int
    seconds: float


class Refused(RequestFailed):
    """A server answers with an error; the message has its words."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(f"{answer.request.url} answers with status {answer.status_code}: {answer.text}")
        self.status = answer.status_code


def post(url: str, body: dict[str, Any], **headers: str) -> Any:
    """The JSON that answers a request; Refused, or an httpx.HTTPError if there is no answer."""
    answer = httpx.post(url, json=body, headers=headers, timeout=READY_S * 3)
    if not answer.is_success:
        raise Refused(answer)
    return answer.json()


def wait_for(url: str) -> None:
    """Wait until a server that was started answers."""
    end = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).is_success:
                return
        if time.monotonic() > end:
            raise RequestFailed(f"{url} was not there within {READY_S:g} s")
        time.sleep(0.05)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@dataclass
class Plain:
    """llama-server by itself."""

    bench: SlotsBench
    log: Path
    kills: Sequence[str] = ("llama-server",)
    url: str = ""
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        port = free_port("127.0.0.1")
        place = ["--host", "127.0.0.1", "--port", str(port)]
        sizes = ["-np", str(self.bench.slots), "-c", str(self.bench.slots * self.bench.context), "--no-kv-unified"]
        command = [program(), "-m", str(self.bench.model), *place, *sizes, "--no-webui", *self.bench.flags.split()]
        self.url = f"http://127.0.0.1:{port}"
        with self.log.open("ab") as sink:
            # Of a session of its own, as Rekindle's is: Linux shares processors out among sessions.
            self.process = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
        wait_for(f"{self.url}/health")

    def kill(self, which: str) -> None:
        self.end()
        self.start()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def cpu_s(self) -> float:
        """Seconds that it has computed."""
        assert self.process is not None
        return _cpu_s(psutil.Process(self.process.pid))

    def turn(self, agent: str, ids: Sequence[int], most: int) -> Turn:
        began = time.perf_counter()
        body = {"prompt": list(ids), "n_predict": most, "temperature": 0, "return_tokens": True, "cache_prompt": True}
        found = post(f"{self.url}/completion", body)
        return Turn(tuple(found["tokens"]), int(found["timings"]["prompt_n"]), time.perf_counter() - began)

    def tokens(self, text: str) -> list[int]:
        found: list[int] = post(f"{self.url}/tokenize", {"content": text})["tokens"]
        return found

    def written(self) -> int:
        return 0


@dataclass
class Fronted:
    """Rekindle in front of a llama-server that it starts."""

    bench: SlotsBench
    log: Path
    store: Path
    kills: Sequence[str] = ("llama-server", "rekindle", "both")
    server: ServerProcess | None = None
    before: int = 0

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.port}"

    def start(self) -> None:
        own = f"-np {self.bench.slots} {self.bench.flags}"
        flags = [str(self.bench.model), "--backend", "llama.cpp", f"--backend-flags={own}"]
        flags += ["--store", str(self.store), "--max-context", str(self.bench.context)]
        flags += ["--hot-bytes", self.bench.hot_bytes] if self.bench.hot_bytes else []
        self.server = ServerProcess(flags, log=self.log, server=ServerSettings(port=0))
        wait_for(f"{self.url}/health/ready")

    def end(self) -> None:
        if self.server is not None:
            self.server.kill()

    def _llama(self) -> list[psutil.Process]:
        assert self.server is not None
        ours = psutil.Process(self.server.pid).children(recursive=True)
        return [each for each in ours if each.name() == PROGRAM]

    def cpu_s(self) -> float:
        """Seconds that Rekindle and llama-server have computed."""
        assert self.server is not None
        ours = psutil.Process(self.server.pid)
        return sum(_cpu_s(each) for each in [ours, *ours.children(recursive=True)])

    def llama_pids(self) -> list[int]:
        """The processes of its llama-server."""
        return [each.pid for each in self._llama()]

    def kill(self, which: str) -> None:
        assert self.server is not None
        if which == "llama-server":
            for each in self._llama():
                each.kill()
            time.sleep(0.5)
            wait_for(f"{self.url}/health/ready")
            return
        self.before += self._bytes()
        theirs = self._llama()
        for each in theirs if which == "both" else ():
            each.kill()
        self.server.kill()
        for each in theirs:
            each.wait(60)
        self.start()

    def turn(self, agent: str, ids: Sequence[int], most: int) -> Turn:
        began = time.perf_counter()
        body = {"prompt": list(ids), "max_tokens": most, "temperature": 0, "rekindle": {"return_ids": True}}
        report = post(f"{self.url}/v1/completions", body, **{"X-Agent-ID": agent})["rekindle"]
        computed = report["prompt_tokens"] - report["reused_tokens"]
        return Turn(tuple(report["completion_ids"]), computed, time.perf_counter() - began)

    def tokens(self, text: str) -> list[int]:
        found: list[int] = post(f"{self.url}/v1/tokenize", {"text": text})["ids"]
        return found

    def written(self) -> int:
        return self.before + self._bytes()

    def _bytes(self) -> int:
        lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        (line,) = [each for each in lines if each.startswith(WRITTEN)]
        return int(float(line.split()[-1]))


@dataclass
class Talk:
    """The histories of all agents in one arm."""

    bench: SlotsBench
    arm: Plain | Fronted
    ids: dict[str, list[int]] = field(default_factory=dict)
    num_shown: dict[str, int] = field(default_factory=dict)  # of the last reply, new in the next prompt
    number: int = 0

    def round(self) -> list[tuple[Turn, int]]:
        """One turn of every agent, with the tokens that are new in its prompt."""
        found = []
        for agent in (f"helper-{number}" for number in range(self.bench.agents)):
            before = self.ids.get(agent, [])
            if before:
                lamp = f"lamp {self.number * 3}"
                more = self.arm.tokens(f" Question {self.number}: what should be done about {lamp} tonight?")
            else:
                lamps = " ".join(f"Lamp {at} of {agent} was lit for {at * 7919 % 101} hours." for at in range(14))
                more = self.arm.tokens(f"{SYSTEM}{agent}'s own notes. {lamps}")
            opening = self.arm.tokens("<think>\n")[-2:] if self.bench.reasoning else []
            turn = self.arm.turn(agent, [*before, *more, *opening], self.bench.reasoning + self.bench.reply)
            shown = turn.ids[self.bench.reasoning :]
            self.ids[agent] = [*before, *more, *shown]
            found.append((turn, self.num_shown.get(agent, 0) + len(more) + len(opening)))
            self.num_shown[agent] = len(shown) if self.bench.reasoning else 0
        self.number += 1
        return found


@contextmanager
def arms(bench: SlotsBench, folder: Path) -> Iterator[dict[str, Plain | Fronted]]:
    """Both arms, started."""
    fronted = Fronted(bench, folder / "rekindle.log", folder / "store")
    made: dict[str, Plain | Fronted] = {"rekindle": fronted, "llama-server": Plain(bench, folder / "plain.log")}
    try:
        for each in made.values():
            each.start()
        yield made
    finally:
        for each in made.values():
            each.end()


def run_slots_bench(bench: SlotsBench, console: Console) -> int:
    """Rounds with kills between them, unless there are no agents, then long prompts; print what each took."""
    most = bench.context - 1 - (LONG_TURNS + 1) * (LONG_NEW + LONG_REPLY)
    if max(bench.lengths, default=0) > most:
        raise ConfigError(
            f"slots of {bench.context:,} tokens have room for a history of {most:,} and the turns after it: give a "
            "larger context or a shorter length"
        )
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as name, arms(bench, Path(name)) as made:
        if bench.agents:
            _rounds(bench, made, console)
        for length in bench.lengths:
            console.print(long_prompts(made, length))
    return 0


def _rounds(bench: SlotsBench, made: dict[str, Plain | Fronted], console: Console) -> None:
    talks = {title: Talk(bench, arm) for title, arm in made.items()}
    table = Table("round", "arm", "computed a turn: median, most", "new: most", "seconds: median", "written a turn")
    for stage in ("cold", "turn 1", "turn 2", "after llama-server", "turn 4", "after rekindle", "after both"):
        for title, talk in talks.items():
            if stage.startswith("after "):
                which = stage.removeprefix("after ")
                time.sleep(1.0)  # slots rest
                talk.arm.kill(which if which in talk.arm.kills else "llama-server")
            before = talk.arm.written()
            found = talk.round()
            time.sleep(0.5)
            computed = [turn.computed for turn, _ in found]
            table.add_row(
                stage if stage[0] != "a" else f"{stage} was killed",
                title,
                f"{statistics.median(computed):g}, {max(computed)}",
                str(max(new for _, new in found)),
                f"{statistics.median(turn.seconds for turn, _ in found):.2f}",
                f"{(talk.arm.written() - before) / bench.agents / 1e6:.2f} MB",
            )
    console.print(table)
    same = sum(talks["rekindle"].ids[agent] == ids for agent, ids in talks["llama-server"].ids.items())
    console.print(f"{same} of {bench.agents} histories are equal in both arms")
    console.print(written_in_all(talks["rekindle"]))


def written_in_all(talk: Talk) -> str:
    """What Rekindle has written, next to the KV of all tokens, those that agents share counted once."""
    assert isinstance(talk.arm, Fronted), "the other arm writes nothing"
    first = [shard_header(path) for path in talk.arm.store.rglob("blocks-*-000.safetensors")]
    token_bytes = sum(int(header["__metadata__"]["payload_bytes"]) for header in first) / BLOCK_TOKENS
    num_tokens = len({tuple(ids[:end]) for ids in talk.ids.values() for end in range(1, len(ids) + 1)})
    kv, written = num_tokens * token_bytes, talk.arm.written()
    return f"{written / 1e6:.1f} MB of records written, KV of {num_tokens:,} tokens {kv / 1e6:.1f}: {written / kv:.2f}"


def shard_header(path: Path) -> dict[str, Any]:
    """What a file of records says of itself."""
    with path.open("rb") as file:
        found: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return found


def long_prompts(made: dict[str, Plain | Fronted], length: int) -> str:
    """Seconds of turns of `LONG_NEW` new tokens on a history of about this length, the arms in turn; of the history
    itself; and of a turn after both processes were killed."""
    talks, cold = dict[str, list[int]](), dict[str, float]()
    seconds: dict[str, list[float]] = {title: [] for title in made}
    for title, arm in made.items():
        text = " ".join(f"Lamp {at} was lit for {at * 7919 % 101} hours." for at in range(length // 8))
        talks[title] = arm.tokens(text)[:length]
        first = arm.turn("long", talks[title], 1)
        talks[title] += first.ids
        cold[title] = first.seconds

    def turn_of(title: str, number: int) -> Turn:
        more = made[title].tokens(" ".join(f"And {number} and {at}." for at in range(40)))[:LONG_NEW]
        turn = made[title].turn("long", [*talks[title], *more], LONG_REPLY)
        talks[title] += [*more, *turn.ids]
        return turn

    before = {title: arm.cpu_s() for title, arm in made.items()}
    for number in range(LONG_TURNS):
        for title in made:
            seconds[title].append(turn_of(title, number).seconds)
    ours, theirs = (statistics.median(seconds[title]) for title in ("rekindle", "llama-server"))
    time.sleep(2.0)  # the slot rests
    spent = {title: (arm.cpu_s() - before[title]) / LONG_TURNS for title, arm in made.items()}
    made["rekindle"].kill("both")
    back = turn_of("rekindle", LONG_TURNS)
    return (
        f"{length} tokens: {ours:.2f} s a turn with Rekindle ({_spread(seconds['rekindle'])}), {theirs:.2f} without "
        f"({_spread(seconds['llama-server'])}): {ours / theirs:.3f}; a turn computes "
        f"{spent['rekindle']:.2f} s and {spent['llama-server']:.2f}. The history took {cold['rekindle']:.1f} s and "
        f"{cold['llama-server']:.1f}; the turn after both were killed {back.seconds:.2f} s, {back.computed} computed"
    )


def _spread(seconds: Sequence[float]) -> str:
    return f"{min(seconds):.2f}-{max(seconds):.2f}"
