"""The session of a scene that is played on a running server, over the routes of /v1/coordination/sessions.

Owns the requests and the form of their answers here. The scene is read and its phases are run in this process; closing
a run's iterator early disconnects, which the server takes as the end of the turn. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from rekindle.cli.remote import Remote
from rekindle.errors import RequestFailed
from rekindle_sessions.http.described import as_body
from rekindle_sessions.machine.decisions import Question
from rekindle_sessions.machine.types import Audience, Plan, Topology, Utterance
from rekindle_sessions.scenes.play import Begun, Events
from rekindle_sessions.service.events import SessionEvent

SESSIONS = "/v1/coordination/sessions"


class RemoteSession:
    """One session of a server; a `SceneSession`. Raises what `Remote.ask` does."""

    def __init__(self, server: Remote) -> None:
        self._server = server
        self._path = SESSIONS

    async def begin(self, plan: Plan) -> Begun:
        """Create the session."""
        info = self._server.ask("POST", SESSIONS, as_body(plan))
        self._path = f"{SESSIONS}/{info['id']}"
        said = self._server.ask("GET", f"{self._path}/messages")["data"]
        return Begun(info["id"], info["layout"], tuple(map(_utterance, said)))

    async def post(self, text: str, *, by: str | None, to: Audience) -> Utterance:
        """Post a message, by the host unless `by` is given."""
        return _utterance(self._server.ask("POST", f"{self._path}/messages", {"text": text, "from": by, "to": to}))

    def turn(self, *, speaker: str | None, to: Audience, topology: Topology) -> Events:
        """Have one agent speak."""
        return self._run("turn", {"speaker": speaker, "to": to, "topology": topology})

    def round(self, *, speakers: Sequence[str] | None, to: Audience, topology: Topology) -> Events:
        """Play a round of a topology."""
        return self._run("round", {"speakers": speakers, "to": to, "topology": topology})

    def vote(self, question: Question, *, voters: Sequence[str]) -> Events:
        """Put a question to the voters."""
        fields = asdict(question)
        return self._run("vote", {"question": fields.pop("text"), **fields, "voters": voters})

    async def end(self) -> None:
        """Delete the session."""
        self._server.ask("DELETE", self._path)

    async def _run(self, what: str, body: Mapping[str, Any]) -> Events:
        """Yield the events of a run; RequestFailed with the server's words if it cannot continue."""
        async with aclosing(self._server.streaming_async(f"{self._path}/{what}/stream", body)) as events:
            async for name, data in events:
                if name == "error":
                    raise RequestFailed(data["message"])
                yield SessionEvent(name, data)


def _utterance(entry: Mapping[str, Any]) -> Utterance:
    to = entry["to"]
    fields = {name: entry[name] for name in ("number", "by", "text", "turn", "purpose", "cut")}
    return Utterance(**fields, to=None if to is None else tuple(to))
