"""The session of a scene that is played in this process, by a coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rekindle_sessions.machine.decisions import Question
from rekindle_sessions.machine.types import Audience, Plan, Topology, Utterance
from rekindle_sessions.scenes.play import Begun, Events
from rekindle_sessions.service.coordinator import Coordinator


class CoordinatedSession:
    """One session of a coordinator, in one namespace; a `SceneSession`."""

    def __init__(self, coordinator: Coordinator, *, namespace: str = "default") -> None:
        self._coordinator = coordinator
        self._namespace = namespace
        self._id = ""

    async def begin(self, plan: Plan) -> Begun:
        """Create the session."""
        info = await self._coordinator.create(self._namespace, plan)
        self._id = info.id
        return Begun(info.id, asdict(info.layout), tuple(self._coordinator.messages(self._namespace, info.id)))

    async def post(self, text: str, *, by: str | None, to: Audience) -> Utterance:
        """Post a message, by the host unless `by` is given."""
        return await self._coordinator.post_message(self._namespace, self._id, text, by=by, to=to)

    def turn(self, *, speaker: str | None, to: Audience, topology: Topology) -> Events:
        """Have one agent speak."""
        return self._coordinator.turn(self._namespace, self._id, speaker=speaker, to=to, topology=topology)

    def round(self, *, speakers: Sequence[str] | None, to: Audience, topology: Topology) -> Events:
        """Play a round of a topology."""
        return self._coordinator.round(self._namespace, self._id, speakers=speakers, to=to, topology=topology)

    def vote(self, question: Question, *, voters: Sequence[str]) -> Events:
        """Put a question to the voters."""
        return self._coordinator.vote(self._namespace, self._id, question, voters=voters)

    async def end(self) -> None:
        """Delete the session."""
        await self._coordinator.delete(self._namespace, self._id)
