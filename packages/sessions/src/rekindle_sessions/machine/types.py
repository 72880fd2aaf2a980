"""Values of a session: participants, utterances, the events applied to the machine and the directives it returns.

All frozen and made of plain values, so that they can be stored as JSON. `None` as an audience means everybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rekindle_sessions.machine.decisions import Decision, Question

Topology = Literal["turn_by_turn", "round_robin", "broadcast", "moderated", "whisper"]
Purpose = Literal["speak", "pick", "ballot"]
Audience = tuple[str, ...] | None
TOPOLOGIES: tuple[Topology, ...] = ("turn_by_turn", "round_robin", "broadcast", "moderated", "whisper")
MOST_AGENTS = 30
HOST = "Host"


@dataclass(frozen=True, slots=True)
class Participant:
    """One agent of a session. `agent`: the identity under which it outlives the session (None: it does not).

    `role` is one line shown to everybody, `persona` is shown to this agent only.
    """

    name: str
    persona: str = ""
    role: str = ""
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a session is set up. `setting` is shown to everybody first, `opening` is the host's first words.

    `moderator` picks the next speaker in a moderated topology. `sampling` holds fields of `SamplingParams` for every
    turn. `listen`: when others prefill what is said: `now`, while and after it is said, or `later`, in their own next
    turn. `layout`: `extend`, or `trailing_cue` for comparison.
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
    """Something that was said: `number` counts up, `to` is who hears it in addition to the speaker.

    `turn` None: it was posted from outside. `cut`: the speaker was interrupted.
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
    """One item of a participant's context.

    `said`: its own words, verbatim as generated, with its reasoning in `thought`; `heard`: somebody else's, `private`
    if only this participant heard them; `cue`: the host's nudge when nobody else spoke since its own last turn.
    """

    kind: Literal["said", "heard", "cue"]
    text: str
    by: str = ""
    private: bool = False
    thought: str | None = None
    number: int | None = None  # of the utterance, if it has one when the entry is added
    turn: int | None = None  # in which it was said


@dataclass(frozen=True, slots=True)
class Prelude:
    """What a participant brings from earlier sessions: its system prompt and its context."""

    system: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn, begun or planned: who speaks, to whom, for what purpose, in which round."""

    number: int
    speaker: str
    to: Audience = None
    purpose: Purpose = "speak"
    round: int | None = None


# Events: what happened. A session is the fold of its events, so these are what is stored.


@dataclass(frozen=True, slots=True)
class MessagePosted:
    """A message from outside: by the host or another non-participant, or in a participant's name."""

    by: str
    text: str
    to: Audience = None


@dataclass(frozen=True, slots=True)
class RoundBegun:
    """A round in which these speak, one after the other or `together` from the same state.

    `to` limits who hears it; `addressees` gives each speaker its only listener. `picks`: the number of turns that the
    moderator assigns, one after the other, among `speakers` (empty: among all).
    """

    speakers: tuple[str, ...] = ()
    together: bool = False
    to: Audience = None
    addressees: tuple[str, ...] = ()
    picks: int = 0


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A turn ended: `text` verbatim as generated, `thought` its reasoning.

    `then` is posted before anybody else speaks: the messages that interrupted it.
    """

    turn: int
    text: str
    thought: str | None = None
    cut: bool = False
    then: tuple[MessagePosted, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """A turn failed; nothing was said. `then` is posted before anybody else speaks."""

    turn: int
    reason: str
    then: tuple[MessagePosted, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundDropped:
    """The rest of the round is dropped."""


@dataclass(frozen=True, slots=True)
class Forked:
    """A new participant with the context and history of another."""

    source: str
    target: str
    persona: str = ""


@dataclass(frozen=True, slots=True)
class Rewound:
    """A participant forgets its last turns and all entries since they began; others keep what they heard."""

    name: str
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Merged:
    """A participant's context gains what another said and heard and it did not."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class VoteBegun:
    """A question is put to the voters, who answer simultaneously, in as many rounds as its mode needs."""

    question: Question
    voters: tuple[str, ...]


Event = MessagePosted | RoundBegun | TurnEnded | TurnFailed | RoundDropped | Forked | Rewound | Merged | VoteBegun


# Directives: what to do now.


@dataclass(frozen=True, slots=True)
class Speak:
    """Generate this turn from its speaker's current context."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Hear:
    """An utterance was added to these listeners' contexts."""

    utterance: Utterance
    listeners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoundComplete:
    """All turns of a round have ended."""

    round: int


@dataclass(frozen=True, slots=True)
class Decided:
    """A vote ended."""

    decision: Decision


Directive = Speak | Hear | RoundComplete | Decided
