"""A client's long conversation with Rekindle in front of a llama-server that is killed in it.

Owns what happens between its parts, and what is kept of it in its directory: the ids of every prompt and reply, the
bodies of requests, the places of kills. `replay` sends them to a llama-server without Rekindle.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from rekindle.config import ServerSettings
from rekindle.harness.client import ServerProcess
from rekindle_backends.llama.command import PROGRAM
from tools.real_clients.client import Client, Place
from tools.real_clients.day import call, wait_idle
from tools.real_clients.llama_model import CONTEXT
from tools.real_clients.serverlog import Request, missing, read_requests, refused
from tools.real_clients.work import BOTH, ENGINE, OTHERS, PARTS, Work, write_ledgers

NUM_SLOTS, NUM_OTHERS = 2, 3
REST_S = 3.0  # between a person's lines
READY = "/health/ready"
KILLS, TURNS, RECORD = "kills.json", "rekindle.json", "day.jsonl"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: tokens of its prompt, how many of them were computed, seconds to the first token of its reply."""

    prompt: int
    computed: int
    first_token_s: float
    cause: str = ""


class Front:
    """Rekindle in front of a scripted llama-server; `kill` starts either again, on the same port."""

    def __init__(self, directory: Path, model: Path, flags: str, *, context: int = CONTEXT) -> None:
        self.log, self.asked = directory / "server.log", directory / "asked.jsonl"
        self._flags = ["--script", str(directory / "script.json"), "--asked", str(self.asked), "--model", str(model)]
        self._flags += [f"--backend-flags=-np {NUM_SLOTS} {flags}", "--max-context", str(context)]
        self._flags += ["--store", str(directory / "store"), "--record", str(directory / RECORD)]
        self._flags += ["--log-format", "json"]
        self._server = self._started(0)

    def _started(self, port: int) -> ServerProcess:
        module = "tools.real_clients.scripted_llama"
        return ServerProcess(self._flags, log=self.log, server=ServerSettings(port=port), module=module)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    @property
    def num_asked(self) -> int:
        """How many replies it was asked for."""
        return len(self._asked_lines().splitlines())

    def _asked_lines(self) -> str:
        return self.asked.read_text("utf-8") if self.asked.exists() else ""

    def requests(self) -> list[Request]:
        """Return what was asked of it until now."""
        return read_requests(self.log.read_text("utf-8"), self._asked_lines())

    def rest(self) -> None:
        """Wait until it is idle, and then as long as a person does."""
        wait_idle(self._server.wait_ready())
        time.sleep(REST_S)

    def kill(self, *, both: bool) -> None:
        """Kill llama-server, or both; return when requests are answered again."""
        engines = [each for each in psutil.Process(self._server.pid).children(recursive=True) if each.name() == PROGRAM]
        for each in engines:
            each.kill()
        if both:
            self._server.kill()
            psutil.wait_procs(engines, timeout=60)
            self._server = self._started(self.port)
        time.sleep(0.5)  # until it is seen that llama-server is gone
        self._server.wait_ready()

    def others(self) -> None:
        """Let more agents than there are slots take a turn each."""
        for number in range(NUM_OTHERS):
            notes = " ".join(f"Buoy {at} of agent {number} was seen {at * 7919 % 101} times." for at in range(40))
            body = {"messages": [{"role": "user", "content": notes}], "max_tokens": 32}
            url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
            httpx.post(url, json=body, headers={"X-Agent-ID": f"other-{number}"}, timeout=600).raise_for_status()

    def close(self) -> None:
        """End it."""
        self._server.stop()


def run_session(client: Client, work: Work, directory: Path, commands: Path, model: Path, flags: str) -> list[str]:
    """Run a client through all parts, in a directory that is made anew; return what went wrong."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "script.json").write_text(work.script(Place(directory, commands, 0)).dumps(), "utf-8")
    problems: list[str] = []
    kills: dict[int, str] = {}  # what was killed, by the number of replies before that
    with closing(Front(directory, model, flags)) as front:
        front.rest()
        place = Place(directory, commands, front.port)
        place.prepare()
        client.configure(place)
        write_ledgers(place)
        for part, command in zip(PARTS, work.commands(), strict=True):
            if part.after == OTHERS:
                front.others()
            elif part.after in (ENGINE, BOTH):
                front.kill(both=part.after == BOTH)
                kills[front.num_asked] = part.after
            problems += call(client, place, command, directory / f"{part.step}.out")
            front.rest()
        requests = front.requests()
    steps = {part.step: part.num_requests for part in PARTS}
    failed = [each for each in requests if each.status >= 500 and each.path != READY]
    problems += [*refused(failed), *(f"never asked for {each}" for each in missing(requests, steps))]
    write(directory / KILLS, kills)
    write(directory / TURNS, turns_of(requests))
    return problems


def turns_of(requests: Sequence[Request]) -> dict[int, Any]:
    """Return what the replies among these requests took, by their numbers."""
    return {each.number: asdict(_turn(each)) for each in requests if each.number >= 0}


def _turn(request: Request) -> Turn:
    computed = request.prompt_tokens - request.reused_tokens
    return Turn(request.prompt_tokens, computed, request.first_token_ms / 1000, request.cause)


def write(path: Path, values: dict[int, Any]) -> None:
    """Write values by number."""
    path.write_text(json.dumps(values, indent=1), "utf-8")


def read(path: Path) -> dict[int, Any]:
    """Read what `write` wrote; nothing if it is not there."""
    return (
        {int(number): value for number, value in json.loads(path.read_text("utf-8")).items()} if path.exists() else {}
    )
