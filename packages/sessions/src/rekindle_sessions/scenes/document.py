"""Read a YAML document and collect its mistakes, each with its line and its path inside the document.

Owns how values are read from YAML nodes: types, bounds, known keys, duplicate keys (which YAML accepts). Reading an
invalid value records a problem and returns a harmless value, so that one pass finds all mistakes. Knows no scenario.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from rekindle.errors import BadRequest
from rekindle_sessions.scenes.templating import Allowed, Template, check, render

Scalar = str | int | float | bool
NOTHING = "tag:yaml.org,2002:null"
MOST_DEEP = 50


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: `line` counts from 1 (None: the whole document), `place` as in `phases[1].decide.options`."""

    line: int | None
    place: str
    message: str


class Reading:
    """State of one pass over a document: the problems found, and the variables its texts may use."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.variables: dict[str, Any] = {}

    def parse(self, text: str) -> Field | None:
        """Return the document's root value; None (and a problem) unless the text is exactly one YAML document."""
        try:
            line = _too_deep(text)
            if line is not None:
                self.problems.append(Problem(line, "", f"lists and names lie in each other more than {MOST_DEEP} deep"))
                return None
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            reason = ", ".join(part for part in (error.context, error.problem) if part)
            message = f"this is not YAML: {reason} (texts with : ? # {{ or [ in them may need quotes)"
            self.problems.append(Problem(mark.line + 1 if mark else None, "", message))
            return None
        except yaml.YAMLError as error:  # a character that YAML does not have
            self.problems.append(Problem(None, "", f"this is not YAML: {' '.join(str(error).split())}"))
            return None
        if node is None:
            self.problems.append(Problem(None, "", "the file is empty"))
            return None
        return Field(self, node, "")


class Field:
    """A value of the document and its path."""

    def __init__(self, reading: Reading, node: yaml.Node, place: str) -> None:
        self._reading = reading
        self._node = node
        self.place = place

    def wrong(self, message: str) -> None:
        """Record a mistake at this place."""
        mark = self._node.start_mark
        self._reading.problems.append(Problem(mark.line + 1 if mark else None, self.place, message))

    @property
    def is_list(self) -> bool:
        """Whether the value is a list."""
        return isinstance(self._node, yaml.SequenceNode)

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a mapping."""
        return isinstance(self._node, yaml.MappingNode)

    def pairs(self) -> dict[str, Field]:
        """Return a mapping with any keys; empty (and a problem) for anything else."""
        if not isinstance(self._node, yaml.MappingNode):
            self.wrong(f"must be names with values, not {self._kind()}")
            return {}
        found: dict[str, Field] = {}
        for key, value in self._node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            inner = Field(self._reading, value, f"{self.place}.{name}" if self.place else name)
            if not name:
                Field(self._reading, key, self.place).wrong("a name must be a word, not a list or nothing")
            elif name in found:
                Field(self._reading, key, inner.place).wrong("is given twice")
            else:
                found[name] = inner
        return found

    def entries(self, known: Iterable[str], required: Iterable[str] = ()) -> dict[str, Field]:
        """Return the known keys of a mapping; record unknown and missing required ones."""
        known = tuple(known)
        pairs = self.pairs()
        for name, field in pairs.items():
            if name not in known:
                field.wrong(f"is not known here: {', '.join(known)} are")
        if self.is_mapping:
            for name in required:
                if name not in pairs:
                    self.wrong(f"needs {name!r}")
        return {name: field for name, field in pairs.items() if name in known}

    def items(self) -> list[Field]:
        """Return the values of a list; empty (and a problem) for anything else."""
        if not isinstance(self._node, yaml.SequenceNode):
            self.wrong(f"must be a list, not {self._kind()}")
            return []
        return [Field(self._reading, item, f"{self.place}[{at}]") for at, item in enumerate(self._node.value)]

    def at(self, path: str) -> Field:
        """Return the value at a path below this one, or the deepest existing one on the way."""
        found = self
        for part in path.split("."):
            name, _, index = part.removesuffix("]").partition("[")
            found = found.pairs().get(name, found)
            if index:
                found = found.items()[int(index)]
        return found

    def items_or_one(self) -> list[Field]:
        """Return the values of a list, or a single value given in its place."""
        return self.items() if self.is_list else [self]

    def scalar(self) -> Scalar | None:
        """Return a string, number or boolean as YAML reads it; None (and a problem) for anything else."""
        value: Any = None
        if isinstance(self._node, yaml.ScalarNode):
            value = _construct(self._node)
        if not isinstance(value, str | int | float | bool):
            self.wrong(f"must be a text, a number, true or false, not {self._kind()}")
            return None
        return value

    def raw(self) -> str:
        """Return a scalar as written, numbers and `yes` included; "" (and a problem) for anything else."""
        if not isinstance(self._node, yaml.ScalarNode) or self._node.tag == NOTHING:
            self.wrong(f"must be a text, not {self._kind()}")
            return ""
        return str(self._node.value)

    def text(self) -> str:
        """Return a text with its variables filled in."""
        raw = self.raw()
        if not self._check(raw, Allowed(self._reading.variables)):
            return ""
        try:
            return render(raw, self._reading.variables).strip()
        except BadRequest as error:
            self.wrong(str(error))
            return ""

    def template(self, allowed: Allowed) -> Template:
        """Return a text in which the `allowed` names are filled in when it is said."""
        raw = self.raw()
        self._check(raw, allowed)
        return Template(raw, self.place)

    def _check(self, raw: str, allowed: Allowed) -> bool:
        found = check(raw, allowed)
        for message in found:
            self.wrong(message)
        return not found

    def filled(self) -> str:
        """Return a text; record a problem if it is empty."""
        text = self.text()
        if isinstance(self._node, yaml.ScalarNode) and self._node.tag != NOTHING and not self._node.value.strip():
            self.wrong("is empty")
        return text

    def whole(self, least: int, most: int) -> int:
        """Return an integer within bounds; it may come from a template."""
        text = self.text()
        try:
            number = int(text)
        except ValueError:
            if text:
                self.wrong(f"must be a whole number, not {text!r}")
            return least
        if not least <= number <= most:
            self.wrong(f"must be from {least} to {most}, not {number}")
            return least
        return number

    def number(self) -> float:
        """Return a number; it may come from a template."""
        text = self.text()
        try:
            return float(text)
        except ValueError:
            if text:
                self.wrong(f"must be a number, not {text!r}")
            return 0.0

    def flag(self) -> bool:
        """Return a boolean."""
        value = self.scalar()
        if isinstance(value, bool):
            return value
        if value is not None:
            self.wrong(f"must be true or false, not {value!r}")
        return False

    def one_of(self, known: Collection[str], what: str) -> str:
        """Return one of `known`, matched exactly; the first of them (and a problem) for anything else."""
        given = self.text()
        if given in known:
            return given
        if given:
            self.wrong(f"{given!r} is no {what}: {', '.join(known) or 'there are none'}")
        return next(iter(known), "")

    def some_of(self, known: Collection[str], what: str) -> tuple[str, ...]:
        """Return a list of some of `known`, without duplicates."""
        found: list[str] = []
        for item in self.items():
            name = item.text()
            if name in found:
                item.wrong(f"{name!r} is named twice")
            elif name in known:
                found.append(name)
            elif name:
                item.one_of(known, what)
        return tuple(found)

    def _kind(self) -> str:
        if self.is_list:
            return "a list"
        if self.is_mapping:
            return "names with values"
        if self._node.tag == NOTHING:
            return "nothing"
        return f"{self._node.value!r}"


def _too_deep(text: str) -> int | None:
    """Return the line where nesting exceeds MOST_DEEP, before anything recurses into it; None if it never does."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MOST_DEEP:
            mark = event.start_mark
            return mark.line + 1 if mark else None
    return None


def _construct(node: yaml.ScalarNode) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError):  # an invalid date, for example
        return None
    finally:
        loader.dispose()
