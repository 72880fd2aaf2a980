"""Scenes written in YAML: agents, phases and outcomes (docs/scenarios.md).

Owns the format as a whole, the shipped scenes, and the error that reports all mistakes of a file at once, each with its
line and its path inside the document. Knows neither engine nor terminal. Variables are filled in when a file is read;
other names in texts (decisions, scores, words), when the texts are said.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rekindle.errors import BadRequest, NotFound, RekindleError
from rekindle.model.params import SamplingParams
from rekindle_sessions.machine.participants import check_new_plan
from rekindle_sessions.machine.types import HOST, TOPOLOGIES, Participant, Plan
from rekindle_sessions.scenes.document import Field, Problem, Reading, Scalar
from rekindle_sessions.scenes.outcomes import Known, Rule, read_rules
from rekindle_sessions.scenes.phases import Phase, PhaseContext, allowed, read_phases

SHIPPED = Path(__file__).absolute().parents[1] / "scenarios"
FIELDS = (
    "name title about models variables setting opening host topology moderator sampling agents phases outcome"
).split()
REQUIRED = ("name", "title", "about", "agents", "phases")
AGENT_FIELDS = ("name", "role", "persona", "knows", "life", "identity")
TAKEN = frozenset({"agents", "decisions", "scores", "words", "round", "rounds", "moves", "held", "of"})
SAMPLING_FIELDS = tuple(item.name for item in fields(SamplingParams) if item.name not in ("logprobs", "logit_bias"))


class ScenarioInvalid(RekindleError):
    """A file is not a valid scene; `problems` are all its mistakes, ordered by line."""

    def __init__(self, path: Path, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda each: each.line or 0))
        many = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        lines = [f"{path.name} cannot be played: {many}", *(f"  {_line(path, each)}" for each in self.problems)]
        super().__init__("\n".join(lines))


def _line(path: Path, problem: Problem) -> str:
    at = str(path) if problem.line is None else f"{path}:{problem.line}"
    return ": ".join(part for part in (at, problem.place, problem.message) if part)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scene, its variables filled in. `models` describes which models play it well."""

    name: str
    title: str
    about: str
    models: str
    variables: Mapping[str, Scalar]
    plan: Plan
    phases: tuple[Phase, ...]
    outcome: tuple[Rule, ...] = ()

    def with_sampling(self, **given: Any) -> Scenario:
        """Return the scene with these SamplingParams fields changed, except those that are None; BadRequest."""
        changed = {**dict(self.plan.sampling), **{name: value for name, value in given.items() if value is not None}}
        SamplingParams(**changed)
        return replace(self, plan=replace(self.plan, sampling=tuple(changed.items())))


def find(name: str) -> Path:
    """Return the file for a path or the name of a shipped scene; NotFound if `name` is neither."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    known = {each.stem: each for each in shipped()}
    if name in known:
        return known[name]
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise NotFound(f"there is no file {path}")
    raise NotFound(f"there is no scenario {name!r}: {', '.join(known)} are shipped, or give a YAML file")


def shipped() -> list[Path]:
    """Return the files of the scenes that come with the package."""
    return sorted(SHIPPED.glob("*.yaml"))


def load(path: Path, given: Mapping[str, str] | None = None) -> Scenario:
    """Read a scene; `given` holds values for its variables, as text.

    ScenarioInvalid if the file is not a valid scene, BadRequest for an unknown variable or a value of the wrong type.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ScenarioInvalid(path, [Problem(None, "", f"cannot be read: {error}")]) from error
    reading = Reading()
    root = reading.parse(text)
    found = None if root is None else _read(reading, root, path.parent, given or {})
    if found is None or reading.problems:
        raise ScenarioInvalid(path, reading.problems)
    return found


def _read(reading: Reading, root: Field, folder: Path, given: Mapping[str, str]) -> Scenario:
    entries = root.entries(FIELDS, REQUIRED)
    variables = _read_variables(entries["variables"]) if "variables" in entries else {}
    reading.variables = {**variables, **_values(variables, given)}
    names = ("about", "models", "setting", "opening")
    texts: dict[str, str] = {name: entries[name].text() for name in names if name in entries}
    plan = _read_plan(root, entries, folder, texts)
    agents = tuple(each.name for each in plan.participants)
    context = PhaseContext(agents, plan.topology, plan.moderator, tuple(variables))
    phases = read_phases(entries["phases"], context) if "phases" in entries else ()
    rules: tuple[Rule, ...] = ()
    if "outcome" in entries:
        deciding = [phase.name for phase in phases if phase.vote is not None]
        options = {phase.name: phase.vote.question.options for phase in phases if phase.vote is not None}
        known = Known(agents, [phase.name for phase in phases], options)
        rules = read_rules(entries["outcome"], known, allowed(context, deciding))
    return Scenario(
        entries["name"].filled() if "name" in entries else "",
        plan.title,
        texts.get("about", ""),
        texts.get("models", ""),
        reading.variables,
        plan,
        phases,
        rules,
    )


def _read_variables(field: Field) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for name, item in field.pairs().items():
        if not name.isidentifier() or name.startswith("_") or keyword.iskeyword(name):
            item.wrong("a variable's name has letters, digits and underscores, and begins with a letter")
        elif name in TAKEN:
            item.wrong(f"{name!r} has a meaning of its own in texts: choose another name")
        value = item.scalar()
        found[name] = "" if value is None else value
    return found


def _values(variables: Mapping[str, Scalar], given: Mapping[str, str]) -> dict[str, Scalar]:
    """Convert given values to the types of their defaults; BadRequest for a wrong type or an unknown variable."""
    found: dict[str, Scalar] = {}
    for name, text in given.items():
        if name not in variables:
            known = ", ".join(f"{each}={value}" for each, value in variables.items()) or "it has none"
            raise BadRequest(f"this scenario has no variable {name!r}: {known}", param=name)
        default = variables[name]
        try:
            found[name] = _as(text, default)
        except ValueError as error:
            kind = {bool: "true or false", int: "a whole number", float: "a number"}[type(default)]
            raise BadRequest(f"{name} must be {kind}, not {text!r}", param=name) from error
    return found


def _as(text: str, default: Scalar) -> Scalar:
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    return type(default)(text)


def _read_plan(root: Field, entries: Mapping[str, Field], folder: Path, texts: Mapping[str, str]) -> Plan:
    participants = _read_agents(entries["agents"], folder) if "agents" in entries else ()
    names = [each.name for each in participants]
    topology = entries["topology"].one_of(TOPOLOGIES, "topology") if "topology" in entries else "round_robin"
    plan = Plan(
        participants,
        next(each for each in TOPOLOGIES if each == topology),
        entries["title"].filled() if "title" in entries else "",
        texts.get("setting", ""),
        texts.get("opening", ""),
        entries["host"].filled() if "host" in entries else HOST,
        entries["moderator"].one_of(names, "agent") if "moderator" in entries else None,
        _read_sampling(entries["sampling"]) if "sampling" in entries else (),
    )
    if "agents" in entries and entries["agents"].is_list:
        try:
            check_new_plan(plan)
        except BadRequest as error:
            _blamed(root, error.param or "").wrong(str(error))
    return plan


def _blamed(root: Field, param: str) -> Field:
    """Return the field to change for an error of the plan as a whole."""
    found = root.at(param)
    return root.at("topology") if found.place == "" and param == "moderator" else found


def _read_sampling(field: Field) -> tuple[tuple[str, Any], ...]:
    found: dict[str, Any] = {}
    given = field.entries(SAMPLING_FIELDS)
    for name, item in given.items():
        if item.is_list:
            found[name] = tuple(each.scalar() for each in item.items())
        else:
            value = item.scalar()
            found[name] = (value,) if name == "stop" else value
    try:
        SamplingParams(**found)
    except BadRequest as error:
        given.get(error.param or "", field).wrong(str(error))
    return tuple(found.items())


def _read_agents(field: Field, folder: Path) -> tuple[Participant, ...]:
    return tuple(_read_agent(item, folder) for item in field.items())


def _read_agent(field: Field, folder: Path) -> Participant:
    given = field.entries(AGENT_FIELDS, ("name",))
    life = given["life"].one_of(("ephemeral", "permanent"), "life") if "life" in given else "ephemeral"
    if life == "permanent" and "identity" not in given and field.is_mapping:
        field.wrong("a permanent agent needs an identity, under which it is remembered")
    is_ephemeral = "life" not in given or given["life"].raw() == "ephemeral"
    if is_ephemeral and "identity" in given:
        given["identity"].wrong("only a permanent agent has an identity: add life: permanent")
    persona = given["persona"].text() if "persona" in given else ""
    knows = _read_knowledge(given["knows"], folder) if "knows" in given else ""
    return Participant(
        given["name"].filled() if "name" in given else "",
        "\n\n".join(part for part in (persona, knows) if part),
        given["role"].text() if "role" in given else "",
        given["identity"].filled() if "identity" in given else None,
    )


def _read_knowledge(field: Field, folder: Path) -> str:
    """Read a text, a list of facts, or documents from files in the scenario's folder."""
    facts: list[str] = []
    documents: list[str] = []
    for item in field.items_or_one():
        if not item.is_mapping:
            facts.append(item.filled())
            continue
        given = item.entries(("file",), ("file",))
        if "file" in given:
            documents.append(_read_document(given["file"], folder))
    return "\n\n".join(part for part in (" ".join(facts), *documents) if part)


def _read_document(field: Field, folder: Path) -> str:
    name = field.filled()
    if not name:
        return ""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        field.wrong(f"{name} lies outside of the scenario's folder: move it there")
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        field.wrong(f"{name} cannot be read: {error}")
        return ""
