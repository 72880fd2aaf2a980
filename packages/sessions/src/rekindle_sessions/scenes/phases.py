"""Phases of a scene: who takes part, what the host says, and who whispers, answers, speaks, votes and plays.

Owns their values and how they are read. The order within a phase: say, whisper, ask, turns, rounds, then decide or
game.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from rekindle.errors import BadRequest
from rekindle_sessions.machine.decisions import Mode, Question
from rekindle_sessions.machine.types import TOPOLOGIES, Audience, Topology
from rekindle_sessions.scenes.document import Field
from rekindle_sessions.scenes.games import Game, read_game
from rekindle_sessions.scenes.templating import Allowed, Template

MOST_ROUNDS = 1_000
FIELDS = ("name", "agents", "topology", "say", "whisper", "ask", "turns", "rounds", "decide", "game")
QUESTION_FIELDS = ("question", "options", "mode", "coordinator", "max_rounds", "threshold", "open")
MODES = tuple(mode for mode in get_args(Mode) if mode != "moves")
ANY = Question("What?", ("yes", "no"))  # placeholder for one that could not be read


@dataclass(frozen=True, slots=True)
class Whisper:
    """A private message to one agent; without `text` the whisperer generates it."""

    by: str
    to: str
    text: Template | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """The host asks one agent, who answers; if `private`, nobody else hears the question or the answer."""

    to: str
    text: Template
    private: bool = False


@dataclass(frozen=True, slots=True)
class Vote:
    """A vote; the text of `question` comes from the template, rendered when the question is put."""

    text: Template
    question: Question


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase. `audience`: who takes part, None for everybody. The moderator assigns a turn of None."""

    name: str
    agents: tuple[str, ...]
    audience: Audience = None
    topology: Topology = "round_robin"
    say: Template | None = None
    whispers: tuple[Whisper, ...] = ()
    asks: tuple[Ask, ...] = ()
    turns: tuple[str | None, ...] = ()
    rounds: int = 0
    vote: Vote | None = None
    game: Game | None = None


@dataclass(frozen=True, slots=True)
class PhaseContext:
    """What phases are validated against: agents, topology, moderator, and names that texts may use."""

    agents: tuple[str, ...]
    topology: Topology
    moderator: str | None
    names: tuple[str, ...]


def read_phases(field: Field, context: PhaseContext) -> tuple[Phase, ...]:
    """Read all phases; texts may use the decisions of earlier phases."""
    phases: list[Phase] = []
    for item in field.items():
        deciding = [phase.name for phase in phases if phase.vote is not None]
        phase = _read_phase(item, context, allowed(context, deciding))
        if phase.name and phase.name in {each.name for each in phases}:
            item.wrong(f"there are two phases named {phase.name!r}")
        phases.append(phase)
    if field.is_list and not phases:
        field.wrong("is empty: a scene needs a phase")
    return tuple(phases)


def allowed(context: PhaseContext, deciding: Sequence[str]) -> Allowed:
    """Return what a text may use once these phases have been decided."""
    members = {"decisions": deciding, "scores": context.agents, "words": context.agents}
    return Allowed((*context.names, "agents"), members)


def _read_phase(field: Field, context: PhaseContext, known: Allowed) -> Phase:
    given = field.entries(FIELDS, ("name",))
    agents = given["agents"].some_of(context.agents, "agent") if "agents" in given else context.agents
    if "agents" in given and given["agents"].is_list and not agents:
        given["agents"].wrong("is empty: leave it out for everybody")
    topology = context.topology
    if "topology" in given:
        topology = _known(given["topology"].one_of(TOPOLOGIES, "topology"))
    is_reported = context.topology == "moderated" and context.moderator is None  # for the scene as a whole
    if topology == "moderated" and context.moderator not in agents and not is_reported:
        (given.get("topology") or field).wrong("a moderated phase needs the scene's moderator among its agents")
    if "decide" in given and "game" in given:
        given["game"].wrong("a phase has a game or a decision: make it two phases")
    is_counted = "turns" in given and not given["turns"].is_list
    if topology == "moderated" and len(agents) < len(context.agents) and is_counted:
        given["turns"].wrong("a moderator picks among all: name the speakers, or give rounds, where not all take part")
    phase = Phase(
        given["name"].filled() if "name" in given else "",
        agents,
        None if agents == context.agents else agents,
        topology,
        given["say"].template(known) if "say" in given else None,
        tuple(_read_whisper(item, agents, known) for item in given["whisper"].items()) if "whisper" in given else (),
        tuple(_read_ask(item, agents, known) for item in given["ask"].items()) if "ask" in given else (),
        _read_turns(given["turns"], agents, topology) if "turns" in given else (),
        given["rounds"].whole(0, MOST_ROUNDS) if "rounds" in given else 0,
        _read_vote(given["decide"], agents, known) if "decide" in given else None,
        read_game(given["game"], agents, known) if "game" in given else None,
    )
    if field.is_mapping and not set(given) & set(FIELDS[3:]):
        field.wrong(f"nothing happens in it: give it one of {', '.join(FIELDS[3:])}")
    return phase


def _known(name: str) -> Topology:
    return next(topology for topology in TOPOLOGIES if topology == name)


def _read_whisper(field: Field, agents: Sequence[str], known: Allowed) -> Whisper:
    given = field.entries(("from", "to", "text"), ("from", "to"))
    by = given["from"].one_of(agents, "agent of this phase") if "from" in given else ""
    to = given["to"].one_of(agents, "agent of this phase") if "to" in given else ""
    if by and by == to:
        field.wrong(f"{by} cannot whisper to itself")
    return Whisper(by, to, given["text"].template(known) if "text" in given else None)


def _read_ask(field: Field, agents: Sequence[str], known: Allowed) -> Ask:
    given = field.entries(("to", "text", "private"), ("to", "text"))
    return Ask(
        given["to"].one_of(agents, "agent of this phase") if "to" in given else "",
        given["text"].template(known) if "text" in given else Template("", field.place),
        given["private"].flag() if "private" in given else False,
    )


def _read_turns(field: Field, agents: Sequence[str], topology: Topology) -> tuple[str | None, ...]:
    """Read the speakers; a number means that many turns in seating order, or (None) picked by the moderator."""
    if field.is_list:
        return tuple(item.one_of(agents, "agent of this phase") for item in field.items())
    if topology == "turn_by_turn":
        field.wrong("must be a list of names: in a turn-by-turn phase nobody else says whose turn it is")
        return ()
    count = field.whole(1, MOST_ROUNDS)
    return (None,) * count if topology == "moderated" else tuple(itertools.islice(itertools.cycle(agents), count))


def _read_vote(field: Field, agents: Sequence[str], known: Allowed) -> Vote:
    given = field.entries(QUESTION_FIELDS, ("question", "options"))
    text = given["question"].template(known) if "question" in given else Template("", field.place)
    if "options" not in given:
        return Vote(text, ANY)
    options = tuple(item.filled() for item in given["options"].items())
    fields: dict[str, Any] = {"options": options, "mode": "majority"}
    if "mode" in given:
        fields["mode"] = given["mode"].one_of(MODES, "mode")
    if "coordinator" in given:
        fields["coordinator"] = given["coordinator"].one_of(agents, "agent of this phase")
    if "max_rounds" in given:
        fields["max_rounds"] = given["max_rounds"].whole(1, MOST_ROUNDS)
    if "threshold" in given:
        fields["threshold"] = given["threshold"].number()
    if "open" in given:
        fields["is_open"] = given["open"].flag()
    try:
        return Vote(text, Question("What?", **fields))
    except BadRequest as error:
        given.get(error.param or "", field).wrong(str(error))
        return Vote(text, ANY)
