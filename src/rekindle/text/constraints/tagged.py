"""Grammars of arguments in tags: every key that must be there, and values of their types.

A text is anything up to its closing tag, within the bounds of its length, or one of those that are listed; a value that
is no text is JSON of its schema. Keys come in the order of the schema. What else a schema may say cannot be enforced in
tags; `unenforced` names it, and it is left free where it need not be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from rekindle.text.constraints.calls import BLANKS, TEXT, ArgumentRules, Pieces, any_but, first_token, literal, terms
from rekindle.text.constraints.schema import DEFINITIONS
from rekindle.text.replies.arguments import leaves, types_in
from rekindle.text.replies.reader import Tags

_ANY_KEY = '/[^<>"\\n]{1,64}/'
_KEY = re.compile(r'[^<>"\r\n]{1,64}')
_LISTED = re.compile(r"[^<>\r\n]*")
_ANNOTATIONS = {"title", "description", "default", "examples", "$comment"}
MOST_CHARS = 1 << 15  # of a text whose length is bounded
_LENGTHS = ("minLength", "maxLength")
_OF_STRINGS = ("pattern", "format", *_LENGTHS)
# What the schema of all arguments may say.
_ROOT = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema", *DEFINITIONS}
Kind = Literal["json", "listed", "text", "any"]


def unenforced(schema: Any, tags: Tags) -> tuple[str, str] | None:
    """Return the place in a tool's schema of something that is not enforced in these tags, and what that is; None: all
    of it is."""
    if schema is None:
        return None
    if not isinstance(schema, Mapping):
        return "", "a schema that is no object"
    strange = sorted(set(schema) - _ROOT)
    if strange or schema.get("type", "object") != "object":
        return "", strange[0] if strange else "a type other than object"
    if not isinstance(schema.get("additionalProperties", False), bool):
        return "additionalProperties", "a schema of other arguments"
    properties = _properties(schema)
    lacking = next((key for key in schema.get("required") or () if key not in properties), None)
    if lacking is not None:
        return "required", f"the argument {lacking!r}, which is not described,"
    for key, value in properties.items():
        what = "a name with signs of tags" if not _KEY.fullmatch(key) else _unenforced_value(value, schema, tags)
        if what is not None:
            return f"properties.{key}", what
    return None


def _unenforced_value(value: Any, root: Mapping[str, Any], tags: Tags) -> str | None:
    kind = kind_of(value, root)
    found = leaves(value, root)
    if kind == "listed":
        return None if all(map(_LISTED.fullmatch, _listed(found))) else "a text with signs of tags"
    if kind == "json":
        return None
    untyped = sorted(key for leaf in found if "type" not in leaf for key in set(leaf) - _ANNOTATIONS)
    if untyped:
        return f"{untyped[0]} without a type"
    strings = [leaf for leaf in found if leaf.get("type") in (None, "string")]
    limited = next(
        (word for leaf in strings for word in (*_OF_STRINGS, "enum", "const", "allOf") if word in leaf), None
    )
    if limited in _LENGTHS and kind == "text" and _bounds(found[0]) is not None and not tags.ends_in_mark:
        return next((word for word in ("pattern", "format") if word in found[0]), None)
    return limited if found else "a value of no schema"


def kind_of(schema: Any, root: Mapping[str, Any]) -> Kind:
    """Return how a value is written: as JSON, as one of the texts that are listed, as text, or as either."""
    found, types = leaves(schema, root), types_in(schema, root)
    if types and "string" not in types:
        return "json"
    if found and types <= {"string", "null"} and _listed(found):
        return "listed"
    return "text" if types == {"string"} and len(found) == 1 else "any"


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _bounds(leaf: Mapping[str, Any]) -> str | None:
    """Return how often a sign may come in a text, as a regular expression has it; None for bounds that make no
    sense."""
    least, most = leaf.get("minLength", 0), leaf.get("maxLength")
    fits = isinstance(least, int) and 0 <= least <= MOST_CHARS
    if not fits or not (most is None or (isinstance(most, int) and least <= most <= MOST_CHARS)):
        return None
    return f"{{{least},{'' if most is None else most}}}"


def tagged_arguments(
    index: int, grammar: Mapping[str, Any], tags: Tags, pieces: Pieces, ends: Collection[int]
) -> ArgumentRules:
    """Return the arguments of tool `index`, of the JSON schema in `grammar`, in these tags; `ends` end a reply."""
    return _Writer(index, grammar["json_schema"], tags, pieces, ends).written()


class _Writer:
    def __init__(
        self, index: int, schema: Mapping[str, Any], tags: Tags, pieces: Pieces, ends: Collection[int]
    ) -> None:
        self._index = index
        self._schema = schema
        self._tags = tags
        self._pieces = pieces
        self._ends = ends
        self._rules: list[str] = []
        self._grammars: dict[str, Mapping[str, Any]] = {}

    def written(self) -> ArgumentRules:
        """Return the rules of all arguments."""
        required = self._schema.get("required") or ()
        parts = []
        properties = {key: each for key, each in _properties(self._schema).items() if _KEY.fullmatch(key)}
        for at, (key, schema) in enumerate(properties.items()):
            argument = self._argument(literal(key), f"{self._index}_{at}", schema, kind_of(schema, self._schema))
            parts.append(argument if key in required else f"({argument})?")
        if not properties or self._schema.get("additionalProperties") is not False:
            parts.append(f"({self._argument(_ANY_KEY, f'{self._index}_any', True, 'any')})*")
        name = f"tagged_{self._index}"
        return ArgumentRules(name, (f"{name}: {' '.join(parts)} {BLANKS}", *self._rules), self._grammars)

    def _argument(self, key: str, name: str, schema: Any, kind: Kind) -> str:
        """Return the term of one argument."""
        before, after = (terms(tag, self._pieces) for tag in self._tags.key)
        if self._tags.key[1] == '"':
            stated = {"json": "false", "text": "true", "listed": "true", "any": "(true|false)"}[kind]
            after += f' /( string="{stated}")?>/'
        opened = f"{BLANKS} {terms(self._tags.value[0], self._pieces)}" if self._tags.value[0] else ""
        value = self._json(name, schema) if kind == "json" else self._text(name, schema, kind)
        return f"{BLANKS} {before} {key} {after} {opened} {value}"

    def _json(self, name: str, schema: Any) -> str:
        """Return a value that is JSON, up to the end of its tag."""
        shared = {key: self._schema[key] for key in (*DEFINITIONS, "x-guidance") if key in self._schema}
        self._grammars[f"value_{name}"] = {"json_schema": {**schema, **shared}}
        return f"{BLANKS} @value_{name} {BLANKS} {terms(self._tags.value[1], self._pieces)}"

    def _text(self, name: str, schema: Any, kind: Kind) -> str:
        """Return a value that is text, or may be, up to the end of its tag."""
        close, line = self._tags.value[1], '"\\n"' if self._tags.lines else ""
        found = leaves(schema, self._schema)
        listed = [each for each in _listed(found) if _LISTED.fullmatch(each)] if kind == "listed" else []
        if listed:
            return f"{line} ({' | '.join(map(literal, listed))}) {line} {terms(close, self._pieces)}"
        bounds = _bounds(found[0]) if kind == "text" and any(word in found[0] for word in _LENGTHS) else None
        text = TEXT if bounds is None else f"/(?s:.){bounds}/"
        token, begun = first_token(close, self._pieces)
        if token is not None:  # what the tag has before it is text like any other
            text = text if begun == close else any_but((token,), self._ends)
            return f"{line} {text} {terms(begun, self._pieces)}"
        rest = f"\n{close}" if self._tags.lines else close
        self._rules.append(f"text_{name}[suffix={literal(rest)}]: {text}")
        return f"{line} text_{name}"


def _listed(found: Collection[Mapping[str, Any]]) -> list[str]:
    """Return the texts that a value of these alternatives may be, as tags have them; none if not all are listed."""
    values: list[Any] = []
    for leaf in found:
        enum = [leaf["const"]] if "const" in leaf else leaf.get("enum")
        if not isinstance(enum, list):
            enum = [None] if leaf.get("type") == "null" else None
        if enum is None or not all(value is None or isinstance(value, str) for value in enum):
            return []
        values += enum
    return [json.dumps(None) if value is None else value for value in values]
