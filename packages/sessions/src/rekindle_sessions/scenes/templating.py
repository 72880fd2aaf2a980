"""Texts with {{ names }}: checked before use, rendered in a sandbox.

Owns the Jinja environment and which names a text may use. An undefined name is an error, both when the text is checked
and when it is rendered, never an empty string.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes

from rekindle.errors import BadRequest
from rekindle.text import bounded

METHODS = frozenset({"items", "keys", "values", "get"})  # of every mapping that a text may use
_ENVIRONMENT = bounded.BoundedEnvironment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)


@dataclass(frozen=True, slots=True)
class Allowed:
    """Names a text may use, and the allowed members of some, such as `decisions.first`."""

    names: Collection[str]
    members: Mapping[str, Collection[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Template:
    """A text rendered when it is said; `place` identifies it in errors."""

    source: str
    place: str

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text with these values; BadRequest, with its place, if that fails."""
        try:
            return render(self.source, values).strip()
        except BadRequest as error:
            raise BadRequest(f"{self.place}: {error}") from error


def render(source: str, values: Mapping[str, Any]) -> str:
    """Return the text with these values; BadRequest if that fails."""
    try:
        return bounded.render(_ENVIRONMENT.compiled(source), values)
    except jinja2.TemplateError as error:
        raise BadRequest(f"the template fails: {error.message or error}") from error
    except bounded.FAILURES as error:
        raise BadRequest(f"the template fails: {type(error).__name__}: {error}") from error


def check(source: str, allowed: Allowed) -> list[str]:
    """Return the errors of a text: invalid template syntax, or names that are not allowed."""
    try:
        _ENVIRONMENT.compiled(source)
        tree = _ENVIRONMENT.parse(source)
    except jinja2.TemplateSyntaxError as error:
        return [f"the template cannot be read: {error.message}"]
    known = {*allowed.names, *allowed.members}
    unknown = sorted(jinja2.meta.find_undeclared_variables(tree) - known - set(_ENVIRONMENT.globals))
    found = [
        f"nothing is called {name!r} here: {', '.join(sorted(known)) or 'no name'} can be used" for name in unknown
    ]
    for owner, member in _members(tree):
        if owner in allowed.members and member not in {*allowed.members[owner], *METHODS}:
            can = ", ".join(sorted(allowed.members[owner])) or "nothing yet"
            found.append(f"{owner} has no {member!r} here: it has {can}")
    return found


def _members(tree: jinja2.nodes.Template) -> list[tuple[str, str]]:
    """Return every `owner.member` and `owner['member']` in a text."""
    found = []
    for node in tree.find_all(jinja2.nodes.Getattr):
        if isinstance(node.node, jinja2.nodes.Name):
            found.append((node.node.name, node.attr))
    for item in tree.find_all(jinja2.nodes.Getitem):
        if isinstance(item.node, jinja2.nodes.Name) and isinstance(item.arg, jinja2.nodes.Const):
            found.append((item.node.name, str(item.arg.value)))
    return found
