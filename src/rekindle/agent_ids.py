"""What an agent's id may be: any UTF-8 of 1 to 256 bytes without control characters.

The one owner of that rule, for the library, HTTP and sessions. Ids that begin with a control character are the engine's
own (see `store.values`): because nobody can give one, they never meet a given id.
"""

from __future__ import annotations

import unicodedata

from rekindle.errors import BadRequest

MAX_ID_BYTES = 256


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
