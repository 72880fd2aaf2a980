"""Session events and session state, as published to clients. All plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rekindle.engine.types import FinishReason, Report
from rekindle.errors import RekindleError
from rekindle_sessions.machine.decisions import Decision
from rekindle_sessions.machine.types import Participant, Plan, Turn, Utterance


@dataclass(frozen=True, slots=True)
class Spoken:
    """The engine's side of a turn: the memory it continues, and how it ended, once it has.

    `error`: why it said nothing.
    """

    agent: str
    request: int | None = None
    report: Report | None = None
    finish: FinishReason | None = None
    error: RekindleError | None = None


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """An event; `data` is JSON-serializable. `spoken`: set when a turn begins or ends."""

    kind: str
    data: dict[str, Any]
    spoken: Spoken | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """An agent of a session: the id of its memory in the engine, and its token count if known."""

    name: str
    agent: str
    is_permanent: bool
    num_tokens: int | None
    taken_in_tokens: int  # total computed for it while listening


@dataclass(frozen=True, slots=True)
class Extension:
    """Whether the model's template lets a prompt extend the previous one and its reply.

    If not, `lost_share` of each prompt is recomputed; `why` says what the template does.
    """

    extends: bool
    lost_share: float
    why: str | None


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """State of a session. `running`: turns being generated; `expected`: who speaks next, as far as that is known.

    `is_unfinished`: a round or a vote (`is_voting`) has begun and not ended, whether or not a run is active.
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
    """Return the event of an utterance outside a turn: by the host, or posted."""
    return SessionEvent("message", {"utterance": asdict(utterance)})


def of_start(turn: Turn, agent: str) -> SessionEvent:
    """Return the event of a turn that begins; `agent` is the id of the speaker's memory."""
    to = None if turn.to is None else list(turn.to)
    data = {"turn": turn.number, "speaker": turn.speaker, "to": to, "purpose": turn.purpose, "round": turn.round}
    return SessionEvent("turn_start", data, Spoken(agent))


def of_failure(turn: Turn, reason: str, spoken: Spoken) -> SessionEvent:
    """Return the event of a failed turn."""
    return SessionEvent("turn_failed", {"turn": turn.number, "speaker": turn.speaker, "error": reason}, spoken)


def of_decision(decision: Decision) -> SessionEvent:
    """Return the event of a vote that ended."""
    return SessionEvent("decision", asdict(decision))
