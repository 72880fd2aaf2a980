"""Ids of agents: what a caller may give, and the kinds of ids that the engine makes itself.

The one owner of both, for the library, HTTP, sessions and the store. A given id is any UTF-8 of 1 to 256 bytes without
control characters. The engine's own begin with one, so the two never meet; on disk and in logs both are plain text.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
import unicodedata

from rekindle.errors import BadRequest

MAX_ID_BYTES = 256


class AgentKind(enum.Enum):
    """What an id stands for. The value is how ids of that kind begin."""

    NAMED = ""  # a caller gave it
    CONVERSATION = "\x01"  # an unnamed conversation, found by its text
    RECOVERED = "\x01recovered-"  # blocks that a rebuild of the index found, and no longer knows whose they are
    BREAKPOINT = "\x01kept-"  # the beginning of a prompt that stays stored because a request marked it

    @property
    def is_memory(self) -> bool:
        """Whether prompts can go on from it; what is not is neither matched nor counted."""
        return self is not AgentKind.BREAKPOINT

    @property
    def continues_unnamed(self) -> bool:
        """Whether a prompt that comes without an agent can go on from it."""
        return self in (AgentKind.CONVERSATION, AgentKind.RECOVERED)

    @property
    def is_temporary(self) -> bool:
        """Whether it makes room before agents with a name do; what was recovered may have been one of those."""
        return self in (AgentKind.CONVERSATION, AgentKind.BREAKPOINT)


def kind_of(agent: str) -> AgentKind:
    """The kind of any id, given or generated."""
    if not agent.startswith(AgentKind.CONVERSATION.value):
        return AgentKind.NAMED
    if agent.startswith(AgentKind.BREAKPOINT.value):
        return AgentKind.BREAKPOINT
    return AgentKind.RECOVERED if agent.startswith(AgentKind.RECOVERED.value) else AgentKind.CONVERSATION


def new_conversation() -> str:
    """A new id for a conversation without a name."""
    return AgentKind.CONVERSATION.value + secrets.token_hex(8)


def recovered(number: int) -> str:
    """The id of one sequence that a rebuild found."""
    return f"{AgentKind.RECOVERED.value}{number}"


def breakpoint_prefix(agent: str) -> str:
    """How the ids of all breakpoints of an agent begin; equally long for every agent."""
    return f"{AgentKind.BREAKPOINT.value}{hashlib.blake2b(agent.encode(), digest_size=8).hexdigest()}-"


def check_agent_id(agent: object, *, where: str) -> str:
    """Return the id, or raise a BadRequest that names the field `where` and says what an id may be."""
    if not isinstance(agent, str):
        raise BadRequest(f"{where}: an agent's id is text, not {type(agent).__name__}", param=where)
    try:
        num_bytes = len(agent.encode())
    except UnicodeEncodeError:
        raise BadRequest(f"{where}: the agent's id is not UTF-8", param=where) from None
    if not 1 <= num_bytes <= MAX_ID_BYTES:
        raise BadRequest(f"{where}: an agent's id has 1 to {MAX_ID_BYTES} bytes, not {num_bytes}", param=where)
    if any(unicodedata.category(character) == "Cc" for character in agent):
        raise BadRequest(f"{where}: an agent's id has no control characters", param=where)
    return agent
