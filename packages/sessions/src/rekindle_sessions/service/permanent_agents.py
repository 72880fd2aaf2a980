"""Memories of permanent agents, which outlive sessions, and the KV of the others, which does not.

A permanent agent joins a session with its current context in the session it was used in last, or with the memory saved
when that session was deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from rekindle.errors import BadRequest, NotFound
from rekindle_sessions.log.inventory import Card
from rekindle_sessions.log.records import Memory, SessionRecords
from rekindle_sessions.machine.coordination import Coordination
from rekindle_sessions.machine.types import Plan, Prelude
from rekindle_sessions.service.session import Session


def held_by(plan: Plan, sessions: Sequence[Session]) -> list[tuple[int, Memory]]:
    """Return (session number, memory) of a plan's permanent agents in `sessions` of their namespace."""
    identities = [each.agent for each in plan.participants if each.agent is not None]
    found = ((session.number, _memory(session, agent)) for agent in identities for session in sessions)
    return [(number, memory) for number, memory in found if memory is not None]


def brought(
    plan: Plan, held: Sequence[tuple[int, Memory]], records: SessionRecords, namespace: str
) -> dict[str, Prelude]:
    """Return the preludes of a plan's permanent agents by name, from `held` and saved memories. Reads the file.

    An agent brings nothing from sessions it was made to forget, even if they continued afterwards.
    """
    preludes: dict[str, Prelude] = {}
    for each in plan.participants:
        if each.agent is None:
            continue
        saved = records.remembered(namespace, each.agent) or Memory(each.agent, 0.0, None)
        memories = [memory for number, memory in held if memory.agent == each.agent and number > saved.forgotten]
        if saved.prelude is not None:
            memories.append(saved)
        if memories and (prelude := max(memories, key=lambda memory: memory.at).prelude) is not None:
            preludes[each.name] = prelude
    return preludes


def check_apart(id: str, plan: Plan, sessions: Sequence[Card]) -> None:
    """Raise BadRequest if the id of a permanent agent would collide with that of an ephemeral agent of a session.

    The id of an ephemeral agent is the session's id, "/" and a name; `sessions` are the others of the namespace.
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


def memories_of(session: Session) -> list[Memory]:
    """Return the memories that a session's permanent agents keep when it is deleted."""
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
    """Delete the KV of a session's ephemeral agents; raises StoreError."""
    for name, each in session.machine.participants.items():
        if each.agent is None:
            with contextlib.suppress(NotFound):  # nothing was ever computed for it
                session.shared.engine.delete(session.agent(name), namespace=session.namespace)
