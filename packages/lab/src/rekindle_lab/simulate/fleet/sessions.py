"""Which requests of a trace belong together: what a client would have named by a session header.

A recorded day or a log says so. Hashed blocks do not: there a request continues the session in which the last of its
known blocks appeared first, unless that block is common to many, as a system prompt is. Knows no replica.
"""

from __future__ import annotations

from collections.abc import Sequence

from rekindle_lab.simulate.trace import Trace, TraceRequest

MAX_BRANCHES = 32  # a block that more different ones follow belongs to no session; 13 do at most in Mooncake's trace


def sessions_of(trace: Trace) -> list[int]:
    """Return the session of each request, numbered from 0 in order of appearance."""
    if all(request.session is not None for request in trace.requests):
        numbers: dict[str | None, int] = {}
        return [numbers.setdefault(request.session, len(numbers)) for request in trace.requests]
    common = _common_blocks(trace.requests)
    owners: dict[int, int] = {}  # block -> the session in which it appeared
    found: list[int] = []
    num_sessions = 0
    for request in trace.requests:
        last = next((block for block in reversed(request.blocks) if block in owners or block in common), None)
        session = num_sessions if last is None else owners.get(last, num_sessions)
        num_sessions = max(num_sessions, session + 1)
        for block in request.stored:
            if block not in common:
                owners.setdefault(block, session)
        found.append(session)
    return found


def _common_blocks(requests: Sequence[TraceRequest]) -> set[int]:
    """Return the blocks with more than MAX_BRANCHES different successors anywhere in the trace."""
    successors: dict[int, set[int]] = {}
    for request in requests:
        for block, after in zip(request.stored, request.stored[1:], strict=False):
            successors.setdefault(block, set()).add(after)
    return {block for block, after in successors.items() if len(after) > MAX_BRANCHES}
