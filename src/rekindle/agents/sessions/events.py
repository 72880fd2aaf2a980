"""What whoever follows a session is told: what happens in it, and how it stands. All of it plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rekindle.agents.machine.decisions import Decision
from rekindle.agents.machine.types import Participant, Plan, Turn, Utterance
from rekindle.engine.types import FinishReason, Report
from rekindle.errors import RekindleError


@dataclass(frozen=True, slots=True)
class Spoken:
    """The engine's side of a turn: whose memory it goes on from, and how it ended, once it has.

    `error`: why it said nothing.
    """

    agent: str
    request: int | None = None
    report: Report | None = None
    finish: FinishReason | None = None
    error: RekindleError | None = None


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """Something that happened; `data` can be written as JSON. `spoken`: of a turn that begins or ends."""

    kind: str
    data: dict[str, Any]
    spoken: Spoken | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """An agent of a session: the id of its memory in the engine, and its tokens as far as known by now."""

    name: str
    agent: str
    is_permanent: bool
    num_tokens: int | None
    taken_in_tokens: int  # computed for it by listening, all in all


@dataclass(frozen=True, slots=True)
class Extension:
    """Whether the model's template lets a prompt go on where the last one and its reply ended.

    `lost_share` of each prompt that it does not is computed again; `why` says what the template does.
    """

    extends: bool
    lost_share: float
    why: str | None


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """How a session stands. `running`: turns being spoken now; `expected`: who speaks next, as far as that is known.

    `is_unfinished`: a round or a vote (`is_voting`) has begun and not ended, whether somebody is speaking or not.
    """

    id: str
    namespace: str
    plan: Plan
    participants: tuple[Participant, ...]
    created: float
    last_use: float
    num_messages: int
    num_rounds: int
    num_turns: int
    is_unfinished: bool
    is_voting: bool
    running: tuple[Turn, ...]
    expected: tuple[str, ...]
    decisions: tuple[Decision, ...]
    agents: Mapping[str, Standing]
    layout: Extension


def of_utterance(utterance: Utterance) -> SessionEvent:
    """Words that no turn brought: of the host, or from outside."""
    return SessionEvent("message", {"utterance": asdict(utterance)})


def of_start(turn: Turn, agent: str) -> SessionEvent:
    """A turn begins, of somebody whose memory is called `agent`."""
    to = None if turn.to is None else list(turn.to)
    told = {"turn": turn.number, "speaker": turn.speaker, "to": to, "purpose": turn.purpose, "round": turn.round}
    return SessionEvent("turn_start", told, Spoken(agent))


def of_failure(turn: Turn, reason: str, spoken: Spoken) -> SessionEvent:
    """A turn cannot be had."""
    return SessionEvent("turn_failed", {"turn": turn.number, "speaker": turn.speaker, "error": reason}, spoken)


def of_decision(decision: Decision) -> SessionEvent:
    """A vote came to its end."""
    return SessionEvent("decision", asdict(decision))
