"""What outlives a session: the contexts of permanent agents. What does not: the KV of the others.

A permanent agent comes into a session with what it has taken in by then in the session that it was used in last, or
with what it kept of that one when it was deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from rekindle.agents.log.inventory import Card
from rekindle.agents.log.records import Memory, SessionRecords
from rekindle.agents.machine.coordination import Coordination
from rekindle.agents.machine.types import Plan, Prelude
from rekindle.agents.sessions.session import Session
from rekindle.errors import BadRequest, NotFound


def held_by(plan: Plan, sessions: Sequence[Session]) -> list[tuple[int, Memory]]:
    """What the permanent agents of a plan have in `sessions`, which are the namespace's, with their numbers."""
    identities = [each.agent for each in plan.participants if each.agent is not None]
    found = ((session.number, _memory(session, agent)) for agent in identities for session in sessions)
    return [(number, memory) for number, memory in found if memory is not None]


def brought(
    plan: Plan, held: Sequence[tuple[int, Memory]], records: SessionRecords, namespace: str
) -> dict[str, Prelude]:
    """What the permanent agents of a plan bring into it, by name; `held` is what they have in sessions. Reads the file.

    Of sessions that had begun when it was made to forget them it brings nothing, whatever was said in them since.
    """
    preludes: dict[str, Prelude] = {}
    for each in plan.participants:
        if each.agent is None:
            continue
        kept = records.remembered(namespace, each.agent) or Memory(each.agent, 0.0, None)
        memories = [memory for number, memory in held if memory.agent == each.agent and number > kept.forgotten]
        if kept.prelude is not None:
            memories.append(kept)
        if memories and (prelude := max(memories, key=lambda memory: memory.at).prelude) is not None:
            preludes[each.name] = prelude
    return preludes


def check_apart(id: str, plan: Plan, sessions: Sequence[Card]) -> None:
    """Raise BadRequest where a permanent agent would be one that belongs to a session, and ends with it.

    Agents of a session are called by its id, "/" and a name; `sessions` are the others of the namespace.
    """
    taken = {id, *(session.id for session in sessions)}
    for at, each in enumerate(plan.participants):
        owner, slash, _ = (each.agent or "").partition("/")
        if slash and owner in taken:
            message = f"{each.agent!r} would be an agent of the session {owner!r}: choose another identity"
            raise BadRequest(message, param=f"agents[{at}].agent")
    for session in sessions:
        for agent in session.agents:
            if agent.startswith(f"{id}/"):
                raise BadRequest(f"{agent!r} is a permanent agent: choose another id than {id!r}", param="id")


def kept_of(session: Session) -> list[Memory]:
    """What the permanent agents of a session keep when it is deleted."""
    identities = [each.agent for each in session.machine.participants.values() if each.agent is not None]
    return [memory for agent in identities if (memory := _memory(session, agent)) is not None]


def _memory(session: Session, agent: str) -> Memory | None:
    machine = session.machine
    for name, each in machine.participants.items():
        if each.agent == agent:
            return Memory(agent, session.last_use, _prelude(machine, name))
    return None


def _prelude(machine: Coordination, name: str) -> Prelude:
    return Prelude(machine.system(name), machine.context(name))


def forget_kv(session: Session) -> None:
    """Have the engine forget the agents that live no longer than their session; raises StoreError."""
    for name, each in session.machine.participants.items():
        if each.agent is None:
            with contextlib.suppress(NotFound):  # it never came to computing anything
                session.desk.engine.delete(session.agent(name), namespace=session.namespace)
