"""What the routes of sessions take: shapes and sizes. What a session makes of it is the session's own business.

An agent here is one of a session; `agent` is the identity under which it lives on, as `/v1/agents` shows it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from rekindle.agent_ids import MAX_ID_BYTES, check_agent_id
from rekindle.agents.machine.decisions import Mode, Question
from rekindle.agents.machine.participants import MOST_NAME_CHARS
from rekindle.agents.machine.types import HOST, MOST_AGENTS, Audience, Participant, Plan, Topology
from rekindle.agents.sessions.turn import MAX_TOKENS
from rekindle.errors import BadRequest
from rekindle.model.params import MAX_STOPS, SamplingParams
from rekindle.server.answers.validation import Items

LONGEST_LINE = 1_000
LONGEST_TEXT = 4_000_000  # characters: more than any context holds, and a bound for what is kept of a session
COUNTS: dict[str, JsonValue] = {"minItems": 2, "maxItems": MOST_AGENTS}  # judged with the plan, in better words


Name = Annotated[str, Field(min_length=1, max_length=MOST_NAME_CHARS)]
Line = Annotated[str, Field(max_length=LONGEST_LINE)]
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
Names = Annotated[list[Name], Field(min_length=1, max_length=MOST_AGENTS)]


class _Body(BaseModel):
    """No more than is named; null means "not given"."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SamplingOptions(_Body):
    """How tokens are picked, with the names and ranges of a chat completion."""

    max_tokens: int | None = Field(default=None, description=f"of one turn; null: {MAX_TOKENS}")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, description="0: no limit")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = Field(
        default=None, description="beside what ends a turn anyhow: to go on as somebody else"
    )
    min_tokens: int | None = None
    ignore_eos: bool | None = None


class AgentBody(_Body):
    """One who takes part."""

    name: Name = Field(description="what the others call it")
    persona: Text = Field(default="", description="what only it is told of itself; may hold long documents")
    role: Line = Field(default="", description="one line that everybody is told")
    agent: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_ID_BYTES,
        description="the identity under which it lives on, with its KV, when the session is deleted; null: it does not",
    )


class SessionBody(_Body):
    """POST /v1/coordination/sessions."""

    agents: Items[AgentBody] = Field(json_schema_extra=COUNTS)
    topology: Topology = Field(default="round_robin", description="who speaks when a round or turn names nobody")
    title: Line = Field(default="", description="for people; no agent is told")
    setting: Text = Field(default="", description="what everybody is told first, computed once for all")
    opening: Text = Field(default="", description="the host's first words")
    host: Name = Field(default=HOST, description="in whose name words from outside are said")
    moderator: Name | None = Field(default=None, description="who picks the next speaker; of `moderated` sessions")
    sampling: SamplingOptions | None = Field(default=None, description="for every turn that brings no own")
    listen: Literal["now", "later"] = Field(
        default="now", description="when others take in what is said: while and after it is, or when they speak"
    )


class _Spoken(_Body):
    sampling: SamplingOptions | None = Field(default=None, description="for this run, before what the session says")


class TurnBody(_Spoken):
    """One turn."""

    speaker: Name | None = Field(default=None, description="null: who is next in this topology")
    to: Name | Names | None = Field(default=None, description="who alone hears it; null: everybody")


class RoundBody(_Spoken):
    """One round."""

    speakers: Names | None = Field(
        default=None, description="in this order, or to be picked from; null: those of the topology"
    )
    to: Name | Names | None = Field(default=None, description="who alone hears it; null: everybody")


class VoteBody(_Spoken):
    """A question; without one, a vote that was broken off goes on."""

    question: Text | None = None
    options: Items[Line] | None = None
    mode: Mode | None = Field(default=None, description="how votes become a decision; null: majority")
    coordinator: Name | None = Field(default=None, description="who decides after all voted, in mode `coordinator`")
    max_rounds: int | None = Field(default=None, ge=1, le=100, description="of a consensus")
    threshold: float | None = Field(default=None, description="of a consensus: the share of votes that must agree")
    is_open: bool | None = Field(default=None, description="true: all voters hear every ballot")
    voters: Names | None = Field(default=None, description="null: everybody")


class MessageBody(_Body):
    """Words put in: of the host, of anybody who is no agent of the session, or given to an agent as its own."""

    text: Text
    by: Name | None = Field(default=None, alias="from", description="null: the host")
    to: Name | Names | None = Field(default=None, description="who alone hears it; null: everybody")


class WhisperBody(MessageBody):
    """Words that only some hear."""

    to: Name | Names


class InterruptBody(MessageBody):
    """Words that cut a speaker short."""

    stop: Literal["nothing", "turn", "round"] = Field(
        default="turn", description="what ends: the turns that run, or all of the round that is left"
    )


class ForkBody(_Body):
    """The name of the new agent, which remembers and has heard all that this one has."""

    target: Name
    persona: Text = Field(default="", description="what only it is told of itself, from now on")


class RewindBody(_Body):
    """How many of its own turns it forgets, with all it heard since."""

    turns: int = Field(default=1, ge=1, le=1_000_000)


class MergeBody(_Body):
    """Whose words and memories this one takes in, as far as it has not heard them."""

    source: Name


def plan_of(body: SessionBody) -> Plan:
    """The plan that a body describes; BadRequest names the field to change."""
    for at, each in enumerate(body.agents):
        if each.agent is not None:
            check_agent_id(each.agent, where=f"agents[{at}].agent")
    return Plan(
        participants=tuple(Participant(each.name, each.persona, each.role, each.agent) for each in body.agents),
        topology=body.topology,
        title=body.title,
        setting=body.setting,
        opening=body.opening,
        host=body.host,
        moderator=body.moderator,
        sampling=tuple((sampling_of(body.sampling) or {}).items()),
        listen=body.listen,
    )


def sampling_of(options: SamplingOptions | None) -> dict[str, Any] | None:
    """Fields of `SamplingParams`, checked; None where nothing was given."""
    if options is None:
        return None
    given: dict[str, Any] = options.model_dump(exclude_none=True)
    if "stop" in given:
        given["stop"] = (given["stop"],) if isinstance(given["stop"], str) else tuple(given["stop"])
    try:
        SamplingParams(**given)
    except BadRequest as error:
        raise BadRequest(f"sampling: {error}", param=f"sampling.{error.param}") from None
    return given


def question_of(body: VoteBody) -> Question | None:
    """The question that is put; None: one that was put before is gone on with."""
    details = body.model_dump(
        include={"mode", "coordinator", "max_rounds", "threshold", "is_open"}, exclude_none=True, exclude_unset=True
    )
    if body.question is None:
        stray = next(iter(details), "options" if body.options else "voters" if body.voters else None)
        if stray is not None:
            raise BadRequest(
                f"{stray} needs a question; an empty body goes on with an unfinished vote", param="question"
            )
        return None
    if body.options is None:
        raise BadRequest("options: say between what is decided", param="options")
    return Question(body.question, tuple(body.options), **details)


def audience_of(to: str | list[str] | None) -> Audience:
    """Who hears it, given as one name or several."""
    if to is None:
        return None
    return (to,) if isinstance(to, str) else tuple(to)


def names_of(names: list[str] | None) -> tuple[str, ...] | None:
    """Names as the service takes them."""
    return None if names is None else tuple(names)
