"""What was said, and who heard it.

Owns the numbers of utterances, and ensures that each reaches exactly its audience.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rekindle.errors import BadRequest
from rekindle_sessions.machine import prompt_layout
from rekindle_sessions.machine.contexts import SILENCE, Contexts
from rekindle_sessions.machine.participants import check_name
from rekindle_sessions.machine.types import (
    Audience,
    Entry,
    Hear,
    Merged,
    MessagePosted,
    Participant,
    Plan,
    Turn,
    TurnEnded,
    Utterance,
)


class Transcript:
    """The utterances of one session, and the contexts of its `participants`, who may become more."""

    def __init__(self, host: str, participants: Mapping[str, Participant]) -> None:
        self.utterances: list[Utterance] = []
        self.contexts = Contexts()
        self._host = host
        self._inherited: dict[str, tuple[list[Utterance], int]] = {}  # what a fork's source had heard, out of how many
        self._participants = participants

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self._participants, self._host)

    def open(self, plan: Plan, returning: Collection[str]) -> None:
        """Add the host's opening; those in `returning`, who have memories, hear a full introduction instead."""
        first = Utterance(0, plan.host, prompt_layout.first_words(plan))
        self.utterances.append(first)
        for name, each in self._participants.items():
            text = prompt_layout.reopening(plan, each) if name in returning else first.text
            self.contexts.append(name, Entry("heard", text, plan.host, number=0), plan.host)
            self.contexts.mark_joined(name)

    def check_message(self, event: MessagePosted) -> None:
        """Raise BadRequest for an empty text or an invalid sender."""
        if not event.text.strip():
            raise BadRequest("text is empty: say something", param="text")
        if event.by not in self._names:
            check_name(event.by, self._names, param="by")

    def post(self, event: MessagePosted) -> Hear:
        """Add a checked message from outside; in a participant's name it counts as if that one had spoken."""
        if event.by not in self._participants:
            return self.publish(event.by, prompt_layout.quoted(event.text, self._names), event.to)
        text = prompt_layout.spoken(event.text, event.by, self._names) or SILENCE
        said = Entry("said", text, event.by, number=len(self.utterances))
        self.contexts.append(event.by, said, self._host)
        return self.publish(event.by, text, event.to)

    def publish_turn(self, turn: Turn, event: TurnEnded) -> Hear:
        """Publish what a turn said. Nobody hears a reply that is empty after cleaning."""
        text = prompt_layout.spoken(event.text, turn.speaker, self._names)
        return self.publish(turn.speaker, text, turn.to, turn=turn, cut=event.cut)

    def publish(self, by: str, text: str, to: Audience, *, turn: Turn | None = None, cut: bool = False) -> Hear:
        """Number an utterance and append it to the contexts of its audience."""
        number, at = len(self.utterances), turn.number if turn else None
        utterance = Utterance(number, by, text, to, at, turn.purpose if turn else "speak", cut)
        self.utterances.append(utterance)
        reached = (name for name in self._participants if name != by and _reaches(utterance, name))
        listeners = tuple(name for name in reached if at is None or not self.contexts.has_turn(name, at))
        for name in listeners:
            alone = to is not None and len(listeners) == 1
            heard = Entry("heard", text, by, alone, number=number, turn=at)
            self.contexts.append(name, heard, self._host)
        return Hear(utterance, listeners)

    def merge(self, event: Merged) -> None:
        """Append to one context what another participant said and heard and this one does not cover."""
        if event.source == event.target:
            raise BadRequest("source and target are the same", param="source")
        for entry in self.contexts.merging(event.source, event.target):
            is_own = entry.kind == "said"
            text = prompt_layout.spoken(entry.text, event.source, self._names) if is_own else entry.text
            if text and not (is_own and text == SILENCE):
                heard = Entry("heard", text, entry.by, True, number=entry.number, turn=entry.turn)
                self.contexts.append(event.target, heard, self._host)

    def fork(self, source: str, target: str) -> None:
        """Give a new participant the context and the history of another."""
        self._inherited[target] = self.heard_by(source), len(self.utterances)
        self.contexts.add(target, self.contexts.of(source))

    def heard_by(self, name: str) -> list[Utterance]:
        """Return the utterances that reached a participant, including its own, by number."""
        before, num_before = self._inherited.get(name, ([], 0))
        since = self.utterances[num_before:]
        return before + [each for each in since if each.by == name or _reaches(each, name)]


def _reaches(utterance: Utterance, name: str) -> bool:
    return bool(utterance.text) and (utterance.to is None or name in utterance.to)
