"""Values of a session as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rekindle_sessions.machine.types import Plan, Turn
from rekindle_sessions.service.events import SessionInfo


def listed(info: SessionInfo) -> dict[str, Any]:
    """A session as a list entry: without fields that may be long."""
    return {
        "id": info.id,
        "object": "coordination.session",
        "namespace": info.namespace,
        "title": info.plan.title,
        "topology": info.plan.topology,
        "names": [each.name for each in info.participants],
        "created": info.created,
        "last_use": info.last_use,
        "num_messages": info.num_messages,
        "num_rounds": info.num_rounds,
        "num_turns": info.num_turns,
        "is_unfinished": info.is_unfinished,
        "is_voting": info.is_voting,
        "running": [_turn(turn) for turn in info.running],
        "expected": list(info.expected),
    }


def detailed(info: SessionInfo) -> dict[str, Any]:
    """A session with every field."""
    return {
        **listed(info),
        "plan": as_body(info.plan),
        "agents": [{"role": each.role, **asdict(info.agents[each.name])} for each in info.participants],
        "decisions": [asdict(each) for each in info.decisions],
        "layout": asdict(info.layout),
    }


def as_body(plan: Plan) -> dict[str, Any]:
    """The body that creates a session with this plan; without `layout` and `reuse`, which only benchmarks vary."""
    fields = asdict(plan)
    del fields["layout"], fields["reuse"]
    return {"agents": fields.pop("participants"), **fields, "sampling": dict(plan.sampling)}


def _turn(turn: Turn) -> dict[str, Any]:
    fields = asdict(turn)
    return {"turn": fields.pop("number"), **fields}
