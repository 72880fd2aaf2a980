"""The values of a session: who takes part, what was said to whom, what is asked of the machine and what it answers.

All frozen and made of plain values, so that they can be kept as JSON. `None` as an audience means everybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rekindle.agents.machine.decisions import Decision, Question

Topology = Literal["turn_by_turn", "round_robin", "broadcast", "moderated", "whisper"]
Purpose = Literal["speak", "pick", "ballot"]
Audience = tuple[str, ...] | None
TOPOLOGIES: tuple[Topology, ...] = ("turn_by_turn", "round_robin", "broadcast", "moderated", "whisper")
MOST_AGENTS = 30
HOST = "Host"


@dataclass(frozen=True, slots=True)
class Participant:
    """One agent of a session. `agent`: the identity under which it lives on when the session ends (None: it does not).

    `role` is one line that everybody is told, `persona` what only it is told.
    """

    name: str
    persona: str = ""
    role: str = ""
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a session is set up. `setting` is what everybody is told first, `opening` the host's first words.

    `moderator` names who picks the next speaker where the topology is moderated. `sampling` are fields of
    `SamplingParams` for every turn. `listen`: when others take in what is said: `now`, while and after it is said, or
    `later`, when they speak themselves. `layout`: `extend`, or `trailing_cue` for comparison.
    """

    participants: tuple[Participant, ...]
    topology: Topology = "round_robin"
    title: str = ""
    setting: str = ""
    opening: str = ""
    host: str = HOST
    moderator: str | None = None
    sampling: tuple[tuple[str, Any], ...] = ()
    listen: Literal["now", "later"] = "now"
    layout: Literal["extend", "trailing_cue"] = "extend"
    reuse: Literal["on", "off"] = "on"


@dataclass(frozen=True, slots=True)
class Utterance:
    """Something that was said: `number` counts up, `to` is who hears it beside the speaker.

    `turn` None: it was put in from outside. `cut`: the speaker was interrupted.
    """

    number: int
    by: str
    text: str
    to: Audience = None
    turn: int | None = None
    purpose: Purpose = "speak"
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in a participant's context, in the order in which it was taken in.

    `said`: its own words, verbatim as generated, with what it thought; `heard`: somebody else's, `private` where nobody
    but it heard them; `cue`: the host's nudge where nobody else spoke since it did.
    """

    kind: Literal["said", "heard", "cue"]
    text: str
    by: str = ""
    private: bool = False
    thought: str | None = None
    number: int | None = None  # of the utterance, where it has one when it is taken in
    turn: int | None = None  # in which it was said


@dataclass(frozen=True, slots=True)
class Prelude:
    """What a participant brings from earlier sessions: how its first prompt began, and all it took in since."""

    system: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that has begun or is to come: who speaks, to whom, what for, in which round."""

    number: int
    speaker: str
    to: Audience = None
    purpose: Purpose = "speak"
    round: int | None = None


# Events: what happened. A session is the fold of its events, so these are what is kept.


@dataclass(frozen=True, slots=True)
class Told:
    """Words from outside, of the host or anybody who is no participant, or given to a participant to say."""

    by: str
    text: str
    to: Audience = None


@dataclass(frozen=True, slots=True)
class RoundBegun:
    """A round in which these speak, one after the other or `together` to the same state.

    `to` bounds who hears it; `addressees` names for each speaker whom alone it speaks to. `picks`: so many turns are
    given out by the moderator, one after the other, to some of `speakers` (none named: to anybody).
    """

    speakers: tuple[str, ...] = ()
    together: bool = False
    to: Audience = None
    addressees: tuple[str, ...] = ()
    picks: int = 0


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A turn came to its end: `text` verbatim as generated, `thought` beside it.

    `then` is told before anybody else speaks: the words of those who interrupted it.
    """

    turn: int
    text: str
    thought: str | None = None
    cut: bool = False
    then: tuple[Told, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """A turn cannot be had; nothing was said. `then` is told before anybody else speaks."""

    turn: int
    reason: str
    then: tuple[Told, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundDropped:
    """What is left of the round is not to be played."""


@dataclass(frozen=True, slots=True)
class Forked:
    """A new participant that remembers and has heard all that another has."""

    source: str
    target: str
    persona: str = ""


@dataclass(frozen=True, slots=True)
class Rewound:
    """A participant forgets its last turns and all it took in since they began; others keep what they heard."""

    name: str
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Merged:
    """A participant takes in what another said and heard that it did not."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class VoteBegun:
    """A question is put to the voters, who answer together, as often as the question's mode needs."""

    question: Question
    voters: tuple[str, ...]


Event = Told | RoundBegun | TurnEnded | TurnFailed | RoundDropped | Forked | Rewound | Merged | VoteBegun


# Directives: what is to be done now.


@dataclass(frozen=True, slots=True)
class Speak:
    """Have the turn's speaker speak from its context as it is now."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Hear:
    """These contexts have grown by this utterance."""

    utterance: Utterance
    listeners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoundComplete:
    """All turns of a round have ended."""

    round: int


@dataclass(frozen=True, slots=True)
class Decided:
    """A vote came to its end."""

    decision: Decision


Directive = Speak | Hear | RoundComplete | Decided
