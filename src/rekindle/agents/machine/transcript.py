"""What was said, and who took it in.

Owns the numbers of utterances and that each reaches exactly those it is for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rekindle.agents.machine import prompt_layout
from rekindle.agents.machine.contexts import SILENCE, Contexts
from rekindle.agents.machine.participants import check_name
from rekindle.agents.machine.types import (
    Audience,
    Entry,
    Hear,
    Merged,
    Participant,
    Plan,
    Told,
    Turn,
    TurnEnded,
    Utterance,
)
from rekindle.errors import BadRequest


class Transcript:
    """The utterances of one session, and the contexts of its `participants`, who may become more."""

    def __init__(self, host: str, participants: Mapping[str, Participant]) -> None:
        self.utterances: list[Utterance] = []
        self.contexts = Contexts()
        self._host = host
        self._inherited: dict[str, tuple[list[Utterance], int]] = {}  # what a fork's source had heard, of how many
        self._participants = participants

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self._participants, self._host)

    def open(self, plan: Plan, returning: Collection[str]) -> None:
        """The host's first words; who returns with memories is told with them where it is."""
        first = Utterance(0, plan.host, prompt_layout.first_words(plan))
        self.utterances.append(first)
        for name, each in self._participants.items():
            text = prompt_layout.reopening(plan, each) if name in returning else first.text
            self.contexts.take_in(name, Entry("heard", text, plan.host, number=0), plan.host)
            self.contexts.came_in(name)

    def check_told(self, event: Told) -> None:
        """Refuse words that cannot be put in, or not by this one."""
        if not event.text.strip():
            raise BadRequest("text is empty: say something", param="text")
        if event.by not in self._names:
            check_name(event.by, self._names, param="by")

    def tell(self, event: Told) -> Hear:
        """Words from outside, checked; given to a participant they are its own, as if it had spoken."""
        if event.by not in self._participants:
            return self.publish(event.by, prompt_layout.quoted(event.text, self._names), event.to)
        text = prompt_layout.spoken(event.text, event.by, self._names) or SILENCE
        said = Entry("said", text, event.by, number=len(self.utterances))
        self.contexts.take_in(event.by, said, self._host)
        return self.publish(event.by, text, event.to)

    def say(self, turn: Turn, event: TurnEnded) -> Hear:
        """What a turn brought. Of a reply of which nothing is left nobody hears."""
        text = prompt_layout.spoken(event.text, turn.speaker, self._names)
        return self.publish(turn.speaker, text, turn.to, turn=turn, cut=event.cut)

    def publish(self, by: str, text: str, to: Audience, *, turn: Turn | None = None, cut: bool = False) -> Hear:
        """Number it, and let everybody take it in whom it is for."""
        number, at = len(self.utterances), turn.number if turn else None
        utterance = Utterance(number, by, text, to, at, turn.purpose if turn else "speak", cut)
        self.utterances.append(utterance)
        reached = (name for name in self._participants if name != by and _reaches(utterance, name))
        listeners = tuple(name for name in reached if at is None or not self.contexts.has_turn(name, at))
        for name in listeners:
            alone = to is not None and len(listeners) == 1
            heard = Entry("heard", text, by, alone, number=number, turn=at)
            self.contexts.take_in(name, heard, self._host)
        return Hear(utterance, listeners)

    def merge(self, event: Merged) -> None:
        """Let one take in what another said and heard that it did not."""
        if event.source == event.target:
            raise BadRequest("source and target are the same", param="source")
        for entry in self.contexts.missing(event.source, event.target):
            is_own = entry.kind == "said"
            text = prompt_layout.spoken(entry.text, event.source, self._names) if is_own else entry.text
            if text and not (is_own and text == SILENCE):
                heard = Entry("heard", text, entry.by, True, number=entry.number, turn=entry.turn)
                self.contexts.take_in(event.target, heard, self._host)

    def fork(self, source: str, target: str) -> None:
        """Let a new participant have taken in, and heard, all that another has."""
        self._inherited[target] = self.heard_by(source), len(self.utterances)
        self.contexts.add(target, self.contexts.of(source))

    def heard_by(self, name: str) -> list[Utterance]:
        """What reached a participant, its own words included, by number."""
        before, num_before = self._inherited.get(name, ([], 0))
        since = self.utterances[num_before:]
        return before + [each for each in since if each.by == name or _reaches(each, name)]


def _reaches(utterance: Utterance, name: str) -> bool:
    return bool(utterance.text) and (utterance.to is None or name in utterance.to)
