"""Grammars of arguments in tags: every key that must be there, and values of their types.

A string is any text up to its closing tag, within the bounds of its length, or one of those that are listed; other
values are JSON of their schemas. Keys come in the order of the schema. What else a schema says of a string (`pattern`,
`format`) is not enforced: `unenforced` names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.text.constraints.calls import BLANKS, TEXT, ArgumentRules, Pieces, any_but, first_token, literal, terms
from rekindle.text.constraints.schema import DEFINITIONS
from rekindle.text.replies.reader import Tags
from rekindle.text.replies.types import types_in

_ANY_KEY = '/[^<>"\\n]{1,64}/'
_UNENFORCED = ("pattern", "format")


def unenforced(schema: Any) -> tuple[str, str] | None:
    """Return the key of an argument with something that is not enforced in tags, and what that is; None: nothing."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    for key, value in (properties or {}).items():
        if types_in(value) == {"string"} and not _listed(value):
            found = next((word for word in _UNENFORCED if word in value), None)
            if found is not None:
                return key, found
    return None


def tagged_arguments(index: int, grammar: Mapping[str, Any], tags: Tags, pieces: Pieces) -> ArgumentRules:
    """Return the arguments of tool `index`, of the JSON schema in `grammar`, in these tags."""
    return _Writer(index, grammar["json_schema"], tags, pieces).written()


class _Writer:
    def __init__(self, index: int, schema: Mapping[str, Any], tags: Tags, pieces: Pieces) -> None:
        self._index = index
        self._schema = schema
        self._tags = tags
        self._pieces = pieces
        self._rules: list[str] = []
        self._grammars: dict[str, Mapping[str, Any]] = {}

    def written(self) -> ArgumentRules:
        """Return the rules of all arguments."""
        properties: Mapping[str, Any] = self._schema.get("properties") or {}
        required = self._schema.get("required") or ()
        parts = []
        for at, (key, schema) in enumerate(properties.items()):
            argument = self._argument(literal(key), f"{self._index}_{at}", schema)
            parts.append(argument if key in required else f"({argument})?")
        if self._schema.get("additionalProperties") is not False:
            parts.append(f"({self._argument(_ANY_KEY, f'{self._index}_any', None)})*")
        name = f"tagged_{self._index}"
        return ArgumentRules(name, (f"{name}: {' '.join(parts)} {BLANKS}", *self._rules), self._grammars)

    def _argument(self, key: str, name: str, schema: Any) -> str:
        """Return the term of one argument; `schema` None: any text."""
        before, after = (terms(tag, self._pieces) for tag in self._tags.key)
        is_json = schema is not None and bool(types_in(schema)) and "string" not in types_in(schema)
        if self._tags.key[1] == '"':
            after += f' /( string="{"false" if is_json else "true"}")?>/' if schema is not None else " /[^<>]{0,32}>/"
        opened = f"{BLANKS} {terms(self._tags.value[0], self._pieces)}" if self._tags.value[0] else ""
        value = self._json(name, schema) if is_json else self._text(name, schema)
        return f"{BLANKS} {before} {key} {after} {opened} {value}"

    def _json(self, name: str, schema: Any) -> str:
        """Return a value that is JSON, up to the end of its tag."""
        shared = {key: self._schema[key] for key in (*DEFINITIONS, "x-guidance") if key in self._schema}
        self._grammars[f"value_{name}"] = {"json_schema": {**schema, **shared}}
        return f"{BLANKS} @value_{name} {BLANKS} {terms(self._tags.value[1], self._pieces)}"

    def _text(self, name: str, schema: Any) -> str:
        """Return a value that is text, up to the end of its tag."""
        close, line = self._tags.value[1], '"\\n"' if self._tags.lines else ""
        listed = _listed(schema)
        if listed:
            return f"{line} ({' | '.join(map(literal, listed))}) {line} {terms(close, self._pieces)}"
        text = TEXT
        if isinstance(schema, Mapping) and ("minLength" in schema or "maxLength" in schema):
            text = f"/(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"
        token, begun = first_token(close, self._pieces)
        if token is not None:  # what the tag has before it is text like any other
            text = text if begun == close else any_but((token,), ())
            return f"{line} {text} {terms(begun, self._pieces)}"
        rest = f"\n{close}" if self._tags.lines else close
        self._rules.append(f"text_{name}[suffix={literal(rest)}]: {text}")
        return f"{line} text_{name}"


def _listed(schema: Any) -> list[str]:
    """Return the texts that a string may be, if they are listed."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum") or []
    return values if all(isinstance(value, str) for value in values) else []
