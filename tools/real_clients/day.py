"""Runs one client through its day, against a server of its own, and collects what came of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rekindle.harness.client import Client as ServerClient
from rekindle.harness.client import ServerProcess
from tools.real_clients.client import NEW, NOTES, Client, Command, Phase, Place
from tools.real_clients.install import NotInstalled
from tools.real_clients.serverlog import Request, missing, read_requests, refused

KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "TERM", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
POLL_S, IDLE_S = 0.2, 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one client did: its requests by part of the day; `problems` is empty if all went as scripted.

    `untested`: why it could not be installed.
    """

    name: str
    version: str
    problems: tuple[str, ...] = ()
    requests: Mapping[Phase, tuple[Request, ...]] = field(default_factory=dict)
    untested: str = ""


def call(client: Client, place: Place, command: Command, output: Path) -> list[str]:
    """Run a client; return what was wrong with how it ended."""
    own = {name: value for name, value in os.environ.items() if name in KEPT}
    variables = own | {"HOME": str(place.home), **client.variables(place), **command.variables}
    variables["PATH"] = f"{place.bin}:{own['PATH']}"
    with output.open("w") as sink:
        try:
            done = subprocess.run(
                list(command.arguments),
                cwd=place.repository,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=command.timeout_s,
            )
        except subprocess.TimeoutExpired:
            return [f"not ended after {command.timeout_s:.0f} s"]
    printed = output.read_text("utf-8", errors="replace")
    problems = [line.removeprefix("FAILED ") for line in printed.splitlines() if line.startswith("FAILED ")]
    if done.returncode and not problems:
        problems.append(f"exit code {done.returncode}: {printed.strip()[-300:]}")
    if command.output and command.output not in printed:
        problems.append(f"{command.output!r} is not in what it printed")
    return problems


def wait_idle(server: ServerClient) -> None:
    """Wait until a server is idle, as it is before a person's next line, for a minute at most."""
    deadline = time.monotonic() + IDLE_S
    while time.monotonic() < deadline:
        stats = server.json("GET", "/v1/stats")
        if not any(stats[name] for name in ("num_running", "num_waiting", "num_background")):
            break
        time.sleep(POLL_S)
    time.sleep(2 * POLL_S)  # the line of a request is written after its answer


class Day:
    """One client at one server."""

    def __init__(self, client: Client, place: Place, server: ServerClient, log: Path, asked: Path) -> None:
        self._client, self._place, self._server = client, place, server
        self._log, self._asked = log, asked
        self._seen = 0
        self.problems: list[str] = []
        self.requests: dict[Phase, tuple[Request, ...]] = {}

    def run(self) -> None:
        """Run all commands, the repository changed before the client is resumed."""
        steps = {name: len(replies) for name, replies in self._client.script(self._place).steps.items()}
        is_changed = False
        for number, command in enumerate(self._client.commands(self._place)):
            if command.phase != "day" and not is_changed:
                (self._place.repository / "untracked.txt").write_text("New.\n", "utf-8")
                is_changed = True
            output = self._place.directory / f"{number}-{command.phase}.out"
            ended = call(self._client, self._place, command, output)
            new = self._new_requests()
            self.requests[command.phase] = (*self.requests.get(command.phase, ()), *new)
            wanted = {name: steps[name] for name in command.steps}
            found = [*ended, *(refused(new) if ended or any(each.status >= 500 for each in new) else ())]
            lacking = missing(new, wanted)
            if lacking:
                found.append(f"never asked for {', '.join(lacking)}")
            self.problems += [f"{command.phase}: {each}" for each in found]
        if self._client.edits and NEW not in (self._place.repository / NOTES).read_text("utf-8"):
            self.problems.append("the edit did not arrive in the file")

    def _new_requests(self) -> list[Request]:
        """Wait until the server is idle; return the requests since the last."""
        wait_idle(self._server)
        asked = self._asked.read_text("utf-8") if self._asked.exists() else ""
        every = read_requests(self._log.read_text("utf-8"), asked)
        new, self._seen = every[self._seen :], len(every)
        return [each for each in new if each.path != "/v1/stats"]


def run_day(client: Client, scratch: Path, model: Path, *, say: Callable[[str], None]) -> Outcome:
    """Install a client and run its day, in directories of `scratch` that are made anew, but for the installation."""
    try:
        say(f"{client.name}: installing")
        installed = scratch / "installed" / client.slug
        version = client.packages.install(installed)
    except NotInstalled as error:
        return Outcome(client.name, "", untested=str(error))
    directory = scratch / "days" / client.slug
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with _serving(client, directory, client.packages.bin(installed), model) as day:
        say(f"{client.name} {version}: running")
        day.run()
    return Outcome(client.name, version, tuple(day.problems), day.requests)


@contextmanager
def _serving(client: Client, directory: Path, commands: Path, model: Path) -> Iterator[Day]:
    log, asked, script = (directory / name for name in ("server.log", "asked.jsonl", "script.json"))
    flags = ["--model", str(model), "--store", str(directory / "store"), "--log-format", "json"]
    flags += ["--script", str(script), "--asked", str(asked), "--threads", "1"]
    # The script holds paths of the project, which exist before the server's port is known.
    script.write_text(client.script(Place(directory, commands, 0)).dumps(), "utf-8")
    with ServerProcess(flags, log=log, module="tools.real_clients.scripted_serve") as server:
        place = Place(directory, commands, server.port)
        place.prepare()
        client.configure(place)
        yield Day(client, place, server.wait_ready(), log, asked)
        server.stop()
