"""A session as a client knows it over HTTP: rounds as they are told, a server killed amid one, what is left of it.

Owns the client's own list of what it was told, which is what a transcript is held to. A kill is the end of a stream
that was asked for; any other end of one is an error.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from benchmarks.coordination.bench import spoken_of
from benchmarks.coordination.kept import Kept, Said, compare, misheard
from benchmarks.coordination.report import Spoken
from benchmarks.coordination.restart_report import Restart
from rekindle.errors import RekindleError
from rekindle.harness.client import Client, ServerProcess

SESSIONS = "/v1/coordination/sessions"
SAID_PART = 4  # one piece of so many tokens is told before the kill
SETTLED_S = 600.0  # a long history on a slow machine


@dataclass(slots=True)
class Following:
    """A round as a client is told of it. `asked_at` and `times` are seconds of `perf_counter`.

    `num_pieces` of text were told of the turn that began last, its `speaker`'s.
    """

    round: int
    asked_at: float = field(default_factory=time.perf_counter)
    first_at: float | None = None
    is_complete: bool = False
    turns: list[Spoken] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    times: dict[int, list[float]] = field(default_factory=dict)
    speaker: str = ""
    num_pieces: int = 0

    def take(self, kind: str, data: Mapping[str, Any]) -> None:
        """Note an event; RekindleError for one that says that a turn could not be had."""
        match kind:
            case "turn_start":
                self.speaker, self.num_pieces = data["speaker"], 0
            case "token":
                now = time.perf_counter()
                self.first_at = self.first_at or now
                self.times.setdefault(data["turn"], []).append(now)
                self.num_pieces += 1
            case "turn_complete":
                times = self.times.get(data["turn"], [])
                self.turns.append(spoken_of(data, self.round, times, begins=not self.turns))
                self.said.append(Said.of(data))
            case "message":
                self.said.append(Said.of(data["utterance"]))
            case "round_complete":
                self.is_complete = True
            case "turn_failed" | "error":
                raise RekindleError(f"round {self.round + 1} could not be played: {data}")


@dataclass(frozen=True, slots=True)
class Kill:
    """When SIGKILL was sent, by the clock of `perf_counter`, who was speaking, and the round as far as it was told."""

    at: float
    speaker: str
    num_pieces: int
    following: Following


class Talk:
    """One session through all its servers, and every message its client was told of, in order.

    `names` in the order of the seats; `rounds` are played at a time; replies have `tokens` tokens.
    """

    def __init__(self, names: Sequence[str], *, rounds: int, tokens: int) -> None:
        self._names = names
        self._rounds_at_once = rounds
        self._pieces_before_kill = max(1, tokens // SAID_PART)
        self._session = ""
        self._told: list[Said] = []
        self._num_rounds = 0

    def begin(self, client: Client, body: Mapping[str, Any]) -> None:
        """Create it; the host's first words are its first message. Where agents listen, wait until they know them."""
        with client.send("POST", SESSIONS, body, {}) as response:
            self._session = json.loads(response.read())["id"]
        self._told += self._messages(client)
        if body["listen"] == "now":
            self._settle(client)

    def _settle(self, client: Client) -> None:
        deadline = time.monotonic() + SETTLED_S
        while any(each["num_tokens"] is None for each in client.json("GET", self._path(""))["agents"]):
            if time.monotonic() > deadline:
                raise RekindleError(f"what all know was not computed within {SETTLED_S:.0f} s")
            time.sleep(0.05)

    def rounds(self, client: Client) -> list[Spoken]:
        """Play as many whole rounds as were asked for."""
        turns: list[Spoken] = []
        for _ in range(self._rounds_at_once):
            turns += self._round(client).turns
        return turns

    def _round(self, client: Client) -> Following:
        following = Following(self._num_rounds)
        with client.send("POST", self._path("/round/stream"), None, {}) as response:
            for kind, data in events(response):
                following.take(kind, data)
        if not following.is_complete or not following.turns:
            raise RekindleError(f"round {following.round + 1} ended before it was complete")
        self._told += following.said
        self._num_rounds += 1
        return following

    def round_until_killed(self, client: Client, server: ServerProcess) -> Kill:
        """Begin a round, kill the server in the middle of it, and note what was on its way.

        Whoever sits in the middle is to be speaking, or somebody behind where that one says too little.
        """
        middle = self._names[(len(self._names) - 1) // 2 :]
        following, kill = Following(self._num_rounds), None
        with client.send("POST", self._path("/round/stream"), None, {}) as response:
            try:
                for kind, data in events(response):
                    following.take(kind, data)
                    is_amid = following.num_pieces >= self._pieces_before_kill
                    if kill is None and is_amid and following.speaker in middle:
                        kill = Kill(time.perf_counter(), following.speaker, following.num_pieces, following)
                        server.kill()
            except (OSError, http.client.HTTPException, ValueError):
                if kill is None:
                    raise
        if kill is None or following.is_complete:
            raise RekindleError("the round was over before its server could be killed: give more --tokens")
        self._told += following.said
        return kill

    def resume(self, client: Client, kill: Kill, ready_s: float) -> Restart:
        """Have the round go on, see what was kept, and play the rounds that follow."""
        told = list(self._told)
        resumed = self._round(client)
        first_at = resumed.first_at
        if first_at is None:
            raise RekindleError("nobody said anything after the restart")
        found = self._messages(client)
        kept = compare(told, found)
        self._told = _with_untold(self._told, found)
        return Restart(
            speaker=kill.speaker,
            num_pieces=kill.num_pieces,
            ready_s=ready_s,
            first_token_s=first_at - resumed.asked_at,
            broken=tuple(kill.following.turns),
            resumed=tuple(resumed.turns),
            after=tuple(self.rounds(client)),
            kept=kept,
        )

    def kept(self, client: Client) -> Kept:
        """All that was ever told against what is there now."""
        return compare(self._told, self._messages(client))

    def misheard(self, client: Client) -> list[str]:
        """What is wrong with what each agent heard."""
        wrong = (misheard(name, self._told, self._messages(client, name)) for name in self._names)
        return [each for each in wrong if each is not None]

    def _messages(self, client: Client, hears: str | None = None) -> list[Said]:
        query = "" if hears is None else f"?hears={quote(hears, safe='')}"
        return [Said.of(each) for each in client.json("GET", self._path(f"/messages{query}"))["data"]]

    def _path(self, path: str) -> str:
        return f"{SESSIONS}/{self._session}{path}"


def _with_untold(told: list[Said], found: list[Said]) -> list[Said]:
    """What was told, and in its place what was on disk before its client could be told."""
    known = {each.number for each in told}
    return sorted([*told, *(each for each in found if each.number not in known)], key=lambda each: each.number)


def events(response: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and data of each event of a stream; comments are passed over, and a line that was cut off."""
    kind = ""
    for raw in response:
        line = raw.decode()
        if line.startswith("event: "):
            kind = line.removeprefix("event: ").rstrip()
        elif line.startswith("data: ") and line.endswith("\n"):
            yield kind, json.loads(line.removeprefix("data: "))
