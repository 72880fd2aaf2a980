"""A session as an HTTP client sees it: streamed rounds, a server killed during one, and what remains of it.

Owns the client's list of received messages, against which transcripts are compared. A kill ends a stream on purpose;
any other early end is an error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from benchmarks.coordination.bench import spoken_of
from benchmarks.coordination.messages import Comparison, Message, compare, misheard
from benchmarks.coordination.report import Spoken
from benchmarks.coordination.restart_report import Restart
from rekindle.errors import RekindleError, RequestFailed
from rekindle.harness.client import Client, ServerProcess
from rekindle.harness.http import events

SESSIONS = "/v1/coordination/sessions"
KILL_PART = 4  # the kill follows the first 1/KILL_PART of a reply
SETTLED_S = 600.0  # a long history on a slow machine


@dataclass(slots=True)
class Following:
    """A round as the client receives it. `asked_at` and `times` are seconds of `perf_counter`.

    `num_pieces`: chunks of text received in the latest turn, that of `speaker`.
    """

    round: int
    asked_at: float = field(default_factory=time.perf_counter)
    first_at: float | None = None
    is_complete: bool = False
    turns: list[Spoken] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    times: dict[int, list[float]] = field(default_factory=dict)
    speaker: str = ""
    num_pieces: int = 0

    def take(self, kind: str, data: Mapping[str, Any]) -> None:
        """Process an event; RekindleError if it reports a failed turn."""
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
                self.messages.append(Message.of(data))
            case "message":
                self.messages.append(Message.of(data["utterance"]))
            case "round_complete":
                self.is_complete = True
            case "turn_failed" | "error":
                raise RekindleError(f"round {self.round + 1} could not be played: {data}")


@dataclass(frozen=True, slots=True)
class Kill:
    """When SIGKILL was sent (seconds of `perf_counter`), who was speaking, and the round as received so far."""

    at: float
    speaker: str
    num_pieces: int
    following: Following


class Talk:
    """One session through all its servers, and every message its client received, in order.

    `names` in seat order; `rounds` are played at a time; replies have `tokens` tokens.
    """

    def __init__(self, names: Sequence[str], *, rounds: int, tokens: int) -> None:
        self._names = names
        self._rounds_at_once = rounds
        self._pieces_before_kill = max(1, tokens // KILL_PART)
        self._session = ""
        self._received: list[Message] = []
        self._num_rounds = 0

    def begin(self, client: Client, body: Mapping[str, Any]) -> None:
        """Create the session; the host's opening is its first message. Wait until agents that listen have read it."""
        with client.send("POST", SESSIONS, body, {}) as response:
            self._session = json.loads(response.read())["id"]
        self._received += self._messages(client)
        if body["listen"] == "now":
            self._settle(client)

    def _settle(self, client: Client) -> None:
        deadline = time.monotonic() + SETTLED_S
        while any(each["num_tokens"] is None for each in client.json("GET", self._path(""))["agents"]):
            if time.monotonic() > deadline:
                raise RekindleError(f"the shared history was not computed within {SETTLED_S:.0f} s")
            time.sleep(0.05)

    def rounds(self, client: Client) -> list[Spoken]:
        """Play the configured number of complete rounds."""
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
        self._received += following.messages
        self._num_rounds += 1
        return following

    def round_until_killed(self, client: Client, server: ServerProcess) -> Kill:
        """Begin a round, kill the server in the middle of it, and record what was received.

        The kill comes while the agent in the middle seat speaks, or a later one if its reply is too short.
        """
        middle = self._names[(len(self._names) - 1) // 2 :]
        following, kill = Following(self._num_rounds), None
        try:
            with client.send("POST", self._path("/round/stream"), None, {}) as response:
                for kind, data in events(response):
                    following.take(kind, data)
                    is_amid = following.num_pieces >= self._pieces_before_kill
                    if kill is None and is_amid and following.speaker in middle:
                        kill = Kill(time.perf_counter(), following.speaker, following.num_pieces, following)
                        server.kill()
        except RequestFailed:
            if kill is None:
                raise
        if kill is None or following.is_complete:
            raise RekindleError("the round was over before its server could be killed: give more --tokens")
        self._received += following.messages
        return kill

    def resume(self, client: Client, kill: Kill, ready_s: float) -> Restart:
        """Resume the round, compare the messages, and play the rounds that follow."""
        received = list(self._received)
        resumed = self._round(client)
        first_at = resumed.first_at
        if first_at is None:
            raise RekindleError("no agent spoke after the restart")
        found = self._messages(client)
        compared = compare(received, found)
        self._received = _with_unreceived(self._received, found)
        return Restart(
            speaker=kill.speaker,
            num_pieces=kill.num_pieces,
            ready_s=ready_s,
            first_token_s=first_at - resumed.asked_at,
            broken=tuple(kill.following.turns),
            resumed=tuple(resumed.turns),
            after=tuple(self.rounds(client)),
            compared=compared,
        )

    def compared(self, client: Client) -> Comparison:
        """Compare all messages ever received with those stored now."""
        return compare(self._received, self._messages(client))

    def misheard(self, client: Client) -> list[str]:
        """Return a description for each agent that heard messages wrongly."""
        wrong = (misheard(name, self._received, self._messages(client, name)) for name in self._names)
        return [each for each in wrong if each is not None]

    def _messages(self, client: Client, hears: str | None = None) -> list[Message]:
        query = "" if hears is None else f"?hears={quote(hears, safe='')}"
        return [Message.of(each) for each in client.json("GET", self._path(f"/messages{query}"))["data"]]

    def _path(self, path: str) -> str:
        return f"{SESSIONS}/{self._session}{path}"


def _with_unreceived(received: list[Message], found: list[Message]) -> list[Message]:
    """Merge in, by number, messages that were on disk before the client could receive them."""
    known = {each.number for each in received}
    return sorted([*received, *(each for each in found if each.number not in known)], key=lambda each: each.number)
