"""`rekindle demo`: four agents talk to a real server, which is killed with SIGKILL; they continue on a new one.

    make demo
    rekindle demo [--model MODEL] [--seed N]

Every turn is sent twice: as the agent, and as the same token ids with reuse off. Verdict, exit code 0 or 1: all
replies equal their reuse-off baselines before and after the restart, and the first turns after it reuse at least
90 % of their prompts. If the model's paths are only `close` to one another (see the banner), half of the replies'
tokens have to come before a difference: roundings turn a choice now and then, and a memory that is not the prompt's
turns the first. Recall of the facts, drawn from the printed seed, is shown next to the verdict.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rekindle.config import Settings
from rekindle.demo.report import Figures, Turn, checks, summary, turn_line
from rekindle.demo.script import AGENTS, Line, part, system_prompt
from rekindle.errors import ConfigError
from rekindle.harness.client import Client, Reply, ServerProcess, variables
from rekindle.store.files.keys import make_directory
from rekindle.store.files.sync import OsFileSystem

MAX_TOKENS = 28
SAVED_WITHIN_S = 30.0


@dataclass(slots=True)
class Conversation:
    """One agent's messages so far."""

    agent: str
    messages: list[dict[str, str]]
    num_turns: int = 0

    def say(self, client: Client, line: Line, phase: Literal["before", "after"]) -> Turn:
        """Send a line as the agent and again with reuse off, then continue with the agent's reply."""
        self.messages.append({"role": "user", "content": line.text})
        self.num_turns += 1
        reply = client.chat(self.messages, agent=self.agent, max_tokens=MAX_TOKENS)
        baseline = self._baseline(client, reply)
        self.messages.append({"role": "assistant", "content": reply.text})
        return Turn(self.agent, self.num_turns, phase, line, reply, baseline)

    def _baseline(self, client: Client, reply: Reply) -> Reply:
        options = {"reuse": "off", "prompt_ids": reply.prompt_ids}
        return client.chat(self.messages, max_tokens=MAX_TOKENS, rekindle=options)


def wait_saved(client: Client) -> None:
    """Wait until all turns are on disk, at most `SAVED_WITHIN_S`; the verdict shows what is missing then."""
    deadline = time.monotonic() + SAVED_WITHIN_S
    while time.monotonic() < deadline:
        agents = client.json("GET", "/v1/agents")["data"]
        if all(agent["saved_tokens"] >= agent["num_tokens"] for agent in agents):
            return
        time.sleep(0.05)


class Demo:
    """One run: the conversations, the turns so far, and the progress display."""

    def __init__(self, settings: Settings, *, seed: int, store: Path, progress: Progress) -> None:
        self._settings = settings
        self._store = store
        self._progress = progress
        self._parts = [part(agent, seed) for agent in AGENTS]
        system = {"role": "system", "content": system_prompt(seed)}
        self._conversations = [Conversation(agent.lower(), [system]) for agent in AGENTS]
        self.turns: list[Turn] = []
        num_turns = sum(len(script.before) + len(script.after) for script in self._parts)
        self._task = progress.add_task("starting the server", total=num_turns)

    def run(self) -> Figures:
        """Run both halves with the kill between them, and return all figures."""
        with self._server() as server:
            client = server.wait_ready()
            model = client.json("GET", "/v1/models")["data"][0]
            self._half(client, "before")
            self._progress.update(self._task, description="waiting until the turns are saved")
            wait_saved(client)
            stats, agents = client.json("GET", "/v1/stats"), client.json("GET", "/v1/agents")["data"]
            server.kill()
        self._progress.console.print("[bold red]kill -9[/]; a new server on the same directory")
        self._progress.update(self._task, description="starting the server again")
        killed = time.monotonic()
        with self._server() as server:
            client = server.wait_ready()
            restart_s = time.monotonic() - killed
            self._half(client, "after")
            server.stop()
        return Figures(model, stats, agents, restart_s, tuple(self.turns))

    def _server(self) -> ServerProcess:
        given = variables(self._settings, self._store)
        return ServerProcess(log=self._store / "server.log", server=self._settings.server, variables=given)

    def _half(self, client: Client, phase: Literal["before", "after"]) -> None:
        scripts = [script.before if phase == "before" else script.after for script in self._parts]
        for lines in zip(*scripts, strict=True):
            for conversation, line in zip(self._conversations, lines, strict=True):
                self._progress.update(self._task, description=f"{conversation.agent}, {phase} the restart")
                turn = conversation.say(client, line, phase)
                self.turns.append(turn)
                self._progress.console.print(turn_line(turn), highlight=False, soft_wrap=True)
                self._progress.advance(self._task)


@contextmanager
def _store_of(settings: Settings) -> Iterator[Path]:
    if settings.store.dir is not None:
        yield make_directory(settings.store.directory(), OsFileSystem())
        return
    with tempfile.TemporaryDirectory(prefix="rekindle-demo-") as name:
        yield Path(name)


def run_demo(settings: Settings, *, seed: int, console: Console) -> int:
    """Run the demo, print turns, tables and verdict; return 0 if the verdict holds, else 1.

    ConfigError if the settings leave nothing to show.
    """
    if settings.cache.reuse == "off" or not settings.store.enabled:
        raise ConfigError("the demo shows what is reused after a restart: it needs --reuse on and a store")
    console.print(f"Four agents, one handbook, facts drawn from seed {seed}. Each turn is repeated with reuse off.")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _store_of(settings) as store, Progress(*columns, console=console, transient=True) as progress:
        figures = Demo(settings, seed=seed, store=store, progress=progress).run()
    for table in summary(figures):
        console.print(table)
    results = checks(figures)
    for check in results:
        console.print(
            f"[{'green' if check.holds else 'red'}]{'holds' if check.holds else 'FAILS'}[/]  {check.text}",
            soft_wrap=True,
        )
    return 0 if all(check.holds for check in results) else 1
