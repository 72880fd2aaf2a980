"""Models of the answers of the routes of sessions; tests validate real answers against them.

A name is one of a session's agents; times are Unix seconds.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rekindle_sessions.machine.types import MOST_AGENTS, Purpose, Topology


class _Extensible(BaseModel):
    """An object that may get more fields later."""

    model_config = ConfigDict(extra="allow")


class TurnEntry(_Extensible):
    """A turn that has begun."""

    turn: int
    speaker: str
    to: list[str] | None = Field(description="the only agents that hear it; null: all")
    purpose: Purpose
    round: int | None


class SessionAgent(_Extensible):
    """An agent of the session, and how much it remembers, if known."""

    name: str
    role: str
    agent: str = Field(description="its identity under /v1/agents")
    is_permanent: bool = Field(description="whether it stays when the session is deleted")
    num_tokens: int | None = Field(description="that it remembers; null: not known yet")
    taken_in_tokens: int = Field(description="prefilled for it while others spoke, in total")


class LayoutEntry(_Extensible):
    """Whether prompts of the served model only grow at their end; if not, `lost_share` of each is recomputed."""

    extends: bool
    lost_share: float
    why: str | None


class SessionEntry(_Extensible):
    """A session as a list entry."""

    id: str
    object: str = "coordination.session"
    namespace: str
    title: str
    topology: Topology
    names: list[str] = Field(description=f"of its agents, in the order of their seats; at most {MOST_AGENTS}")
    created: float
    last_use: float
    num_messages: int
    num_rounds: int
    num_turns: int
    is_unfinished: bool = Field(description="a round or vote has begun and not ended")
    is_voting: bool = Field(description="it is a vote")
    running: list[TurnEntry] = Field(description="turns that are running now")
    expected: list[str] = Field(description="who speaks next, as far as that is known")


class SessionDetail(SessionEntry):
    """A session with every field. `plan` is the body that creates another one like it."""

    plan: dict[str, Any]
    agents: list[SessionAgent]
    decisions: list[dict[str, Any]]
    layout: LayoutEntry


class SessionDocument(BaseModel):
    """A session for another server; what is in plan, preludes and events is up to the version."""

    version: int
    plan: dict[str, Any]
    preludes: dict[str, Any] = Field(description="what its permanent agents remembered of earlier sessions, by name")
    events: list[dict[str, Any]]


class SessionList(BaseModel):
    """Sessions, newest first."""

    object: Literal["list"] = "list"
    data: list[SessionEntry]


class MessageEntry(_Extensible):
    """A message. `turn` null: it came from outside; `cut`: its speaker was interrupted."""

    number: int
    by: str
    text: str
    to: list[str] | None = Field(description="the only agents that heard it; null: all")
    turn: int | None
    purpose: Purpose
    cut: bool


class ListedMessage(MessageEntry):
    """A message with the figures of its turn and the id of its receipt; null: from outside, or no longer known."""

    rekindle: dict[str, Any] | None = Field(description="the report of the turn's request")
    gap_ms: float | None
    first_token_ms: float | None
    taken_in_tokens: int | None
    receipt: str | None = Field(description="its id under /v1/receipts; a turn that was cut off with its run has none")


class MessageList(BaseModel):
    """Messages in order."""

    object: Literal["list"] = "list"
    data: list[ListedMessage]


class Deleted(BaseModel):
    """A session was deleted."""

    id: str
    object: str = "coordination.session"
    deleted: bool


class Run(BaseModel):
    """The result of a turn, round or vote: the data of its events, in order."""

    session: str
    object: str = "coordination.run"
    turns: list[dict[str, Any]] = Field(description="of turn_complete")
    failed: list[dict[str, Any]] = Field(description="of turn_failed")
    messages: list[dict[str, Any]] = Field(description="of message: messages from outside or from the host")
    rounds: list[dict[str, Any]] = Field(description="of round_complete; a vote may need several")
    decision: dict[str, Any] | None = Field(description="of a vote")
    error: dict[str, Any] | None = Field(description="why it ended early; messages sent by then stay")


class RunEvent(BaseModel):
    """One event of a stream, whose name is `event` and whose JSON is `data`."""

    event: Literal[
        "turn_start", "token", "turn_complete", "turn_failed", "message", "decision", "round_complete", "error"
    ]
    data: dict[str, Any]


class Comparison(_Extensible):
    """What two agents of a session have in common; `parts_at` null: the other one has heard more."""

    agents: list[str]
    shared_entries: int = Field(description="messages that both have seen, from the beginning")
    shared_tokens: int = Field(description="of their prompts, from the beginning")
    num_tokens: dict[str, int]
    parts_at: dict[str, dict[str, Any] | None]
    last_words: dict[str, str | None]
