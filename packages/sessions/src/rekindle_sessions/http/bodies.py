"""Request bodies of the routes of sessions: shapes and sizes. What they mean is up to the session.

An agent here is one of a session; `agent` is its permanent identity, as `/v1/agents` shows it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue

from rekindle.agent_ids import MAX_ID_BYTES, check_new_agent_id
from rekindle.errors import BadRequest
from rekindle.model.params import MAX_STOPS, SamplingParams
from rekindle.server.answers.options import with_sampling
from rekindle.server.answers.validation import Items, StrictModel
from rekindle.text.messages import sound
from rekindle_sessions.machine.decisions import Mode, Question
from rekindle_sessions.machine.participants import MOST_NAME_CHARS
from rekindle_sessions.machine.types import HOST, MOST_AGENTS, Audience, Participant, Plan, Topology
from rekindle_sessions.service.turn import MAX_TOKENS

LONGEST_LINE = 1_000
LONGEST_TEXT = 4_000_000  # characters: more than any context holds, and a bound for what is stored of a session
COUNTS: dict[str, JsonValue] = {"minItems": 2, "maxItems": MOST_AGENTS}  # checked with the plan, in better words


def _sound(value: Any) -> Any:
    """Replace what no prompt may contain, such as half an emoji, which clients in JavaScript cut texts into."""
    return sound(value) if isinstance(value, str) else value


Name = Annotated[str, Field(min_length=1, max_length=MOST_NAME_CHARS)]
Line = Annotated[str, Field(max_length=LONGEST_LINE)]
Text = Annotated[str, BeforeValidator(_sound), Field(max_length=LONGEST_TEXT)]
Names = Annotated[list[Name], Field(min_length=1, max_length=MOST_AGENTS)]
Hearers = Annotated[list[Name], Field(max_length=MOST_AGENTS)]


_STOP = (
    str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None,
    Field(default=None, description="in addition to the built-in stop: a turn ends before it speaks as another agent"),
)


@with_sampling("sessions", stop=_STOP, top_k=(int | None, Field(default=None, description="0: no limit")))
class SamplingOptions(StrictModel):
    """How tokens are picked, with the names and ranges of a chat completion."""

    max_tokens: int | None = Field(default=None, description=f"of one turn; null: {MAX_TOKENS}")


class AgentBody(StrictModel):
    """An agent of the session."""

    name: Name = Field(description="what the others call it")
    persona: Text = Field(default="", description="instructions that only it sees; may hold long documents")
    role: Line = Field(default="", description="one line that all agents see")
    agent: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_ID_BYTES,
        description="the identity that it and its KV keep when the session is deleted; null: it is deleted too",
    )


class SessionBody(StrictModel):
    """POST /v1/coordination/sessions."""

    agents: Items[AgentBody] = Field(json_schema_extra=COUNTS)
    topology: Topology = Field(default="round_robin", description="who speaks when a round or turn names no speaker")
    title: Line = Field(default="", description="for people; no agent sees it")
    setting: Text = Field(default="", description="the text that all agents see first, computed once for all")
    opening: Text = Field(default="", description="the host's first message")
    host: Name = Field(default=HOST, description="the sender of messages from outside")
    moderator: Name | None = Field(default=None, description="who picks the next speaker; of `moderated` sessions")
    sampling: SamplingOptions | None = Field(default=None, description="for every turn without its own")
    listen: Literal["now", "later"] = Field(
        default="now", description="when agents prefill what others say: while and after it is said, or when they speak"
    )


class _RunBody(StrictModel):
    sampling: SamplingOptions | None = Field(default=None, description="for this run, instead of the session's")


class _SpeakingBody(_RunBody):
    to: Name | Hearers | None = Field(
        default=None, description="the only agents that hear it, none of them with an empty list; null: all"
    )
    topology: Topology | None = Field(default=None, description="of this run, instead of the session's")


class TurnBody(_SpeakingBody):
    """One turn."""

    speaker: Name | None = Field(default=None, description="null: the next one in this topology")


class RoundBody(_SpeakingBody):
    """One round."""

    speakers: Names | None = Field(
        default=None, description="in this order, or for the moderator to pick from; null: those of the topology"
    )


class VoteBody(_RunBody):
    """A question; without one, an unfinished vote is resumed."""

    question: Text | None = None
    options: Items[Line] | None = None
    mode: Mode | None = Field(default=None, description="how votes become a decision; null: majority")
    coordinator: Name | None = Field(default=None, description="who decides after all voted, in mode `coordinator`")
    max_rounds: int | None = Field(default=None, ge=1, le=100, description="of a consensus")
    threshold: float | None = Field(default=None, description="of a consensus: the share of votes that must agree")
    is_open: bool | None = Field(default=None, description="true: all voters hear every ballot")
    voters: Names | None = Field(default=None, description="null: all agents")


class MessageBody(StrictModel):
    """A message from outside: in the name of the host, of anyone outside the session, or of one of its agents."""

    text: Text
    by: Name | None = Field(default=None, alias="from", description="null: the host")
    to: Name | Names | None = Field(default=None, description="the only agents that hear it; null: all")


class WhisperBody(MessageBody):
    """A message that only some agents hear."""

    to: Name | Names


class InterruptBody(MessageBody):
    """A message that interrupts a speaker."""

    stop: Literal["nothing", "turn", "round"] = Field(
        default="turn", description="what ends: the running turns, or the rest of the round"
    )


class ForkBody(StrictModel):
    """The name of the new agent, which remembers and has heard all that this one has."""

    target: Name
    persona: Text = Field(default="", description="instructions that only it sees, from now on")


class RewindBody(StrictModel):
    """How many of its own turns the agent forgets, with all it heard since."""

    turns: int = Field(default=1, ge=1, le=1_000_000)


class MergeBody(StrictModel):
    """The agent whose messages and memories this one receives, as far as it has not heard them."""

    source: Name


class ImportBody(StrictModel):
    """POST /v1/coordination/sessions/import."""

    # Not `JsonValue`: bodies are validated on the event loop, and this document in a worker.
    session: dict[str, Any] = Field(description="what `export` of the other server has answered")
    id: str | None = Field(default=None, description="of the new session; null: the server makes one")


def plan_of(body: SessionBody) -> Plan:
    """Return the plan that a body describes; BadRequest names the field to change."""
    for at, each in enumerate(body.agents):
        if each.agent is not None:
            check_new_agent_id(each.agent, where=f"agents[{at}].agent")
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
    """Return fields of `SamplingParams`, checked; None if no options were given."""
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
    """Return the question to put; None: resume the one put before."""
    details = body.model_dump(
        include={"mode", "coordinator", "max_rounds", "threshold", "is_open"}, exclude_none=True, exclude_unset=True
    )
    if body.question is None:
        stray = next(iter(details), "options" if body.options else "voters" if body.voters else None)
        if stray is not None:
            raise BadRequest(f"{stray} needs a question; an empty body resumes an unfinished vote", param="question")
        return None
    if body.options is None:
        raise BadRequest("options: list what to choose from", param="options")
    return Question(body.question, tuple(body.options), **details)


def audience_of(to: str | list[str] | None) -> Audience:
    """The agents that hear a message, given as one name or several."""
    if to is None:
        return None
    return (to,) if isinstance(to, str) else tuple(to)


def names_of(names: list[str] | None) -> tuple[str, ...] | None:
    """Names as the service takes them."""
    return None if names is None else tuple(names)
