"""Agent ids: validation of those that callers give, and the kinds that the engine generates.

The one owner of both, for the library, HTTP, sessions and the store. A given id is any UTF-8 of 1 to 256 bytes without
control characters, a new one of characters that are all seen (`is_shown`, the rule for names in sessions, too), and
neither "." nor "..", which browsers and proxies take out of a path, so that a request would reach another agent. Ids of
older stores may be of these: they can be read and deleted. Generated ids begin with a control character, so the two
never collide; on disk and in logs both are plain text.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
import unicodedata

from rekindle.errors import BadRequest

MAX_ID_BYTES = 256


class AgentKind(enum.Enum):
    """The kind of an agent id; the value is the prefix of its ids."""

    NAMED = ""  # given by a caller
    CONVERSATION = "\x01"  # an unnamed conversation, found by its text
    RECOVERED = "\x01recovered-"  # blocks found by a rebuild of the index, their agent unknown
    BREAKPOINT = "\x01kept-"  # a prefix of a prompt that stays stored because a request marked it

    @property
    def is_memory(self) -> bool:
        """Whether prompts can continue from it; other kinds are neither matched nor counted."""
        return self is not AgentKind.BREAKPOINT

    @property
    def continues_unnamed(self) -> bool:
        """Whether a prompt without an agent can continue from it."""
        return self in (AgentKind.CONVERSATION, AgentKind.RECOVERED)

    @property
    def is_temporary(self) -> bool:
        """Whether it is evicted before named agents; a recovered one may have been named."""
        return self in (AgentKind.CONVERSATION, AgentKind.BREAKPOINT)


def kind_of(agent: str) -> AgentKind:
    """Return the kind of any id, given or generated."""
    if not agent.startswith(AgentKind.CONVERSATION.value):
        return AgentKind.NAMED
    if agent.startswith(AgentKind.BREAKPOINT.value):
        return AgentKind.BREAKPOINT
    return AgentKind.RECOVERED if agent.startswith(AgentKind.RECOVERED.value) else AgentKind.CONVERSATION


def new_conversation() -> str:
    """Return a new id for an unnamed conversation."""
    return AgentKind.CONVERSATION.value + secrets.token_hex(8)


def recovered(number: int) -> str:
    """Return the id of one sequence found by a rebuild."""
    return f"{AgentKind.RECOVERED.value}{number}"


def breakpoint_prefix(agent: str) -> str:
    """Return the prefix of the ids of an agent's breakpoints; its length is the same for every agent."""
    return f"{AgentKind.BREAKPOINT.value}{hashlib.blake2b(agent.encode(), digest_size=8).hexdigest()}-"


def check_agent_id(agent: object, *, where: str) -> str:
    """Return a valid id; else raise a BadRequest that names the field `where` and the rule that it breaks."""
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


def check_new_agent_id(agent: object, *, where: str) -> str:
    """Return a valid id under which something may be remembered; else a BadRequest as `check_agent_id` raises it."""
    valid = check_agent_id(agent, where=where)
    if valid in (".", ".."):
        raise BadRequest(f'{where}: an agent\'s id is not "." or "..", which browsers take out of a path', param=where)
    unseen = next((character for character in valid if not is_shown(character)), None)
    if unseen is not None:
        raise BadRequest(
            f"{where}: an agent's id has no invisible characters, marks of direction, or blanks but the space, so that "
            f"no two ids look alike; this one has U+{ord(unseen):04X}: leave it out",
            param=where,
        )
    return valid


def is_shown(text: str) -> bool:
    """Whether each character of a name is seen as itself: none is a control character, a line break, a mark of
    direction, a joiner, or a blank but the space."""
    return text.isprintable()
