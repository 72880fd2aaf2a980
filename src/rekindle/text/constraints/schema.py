"""JSON schemas as the grammar library takes them, and the place of what is wrong in one.

Formats that it does not know are annotations, as the standard has them, and left out. What it cannot enforce is refused
by its place in the schema: a reply that only looks checked helps nobody.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rekindle.text.constraints.alternatives import exclusive, needs_default

# What llguidance 1.9 enforces of `format`.
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
DEFINITIONS = ("$defs", "definitions")
_MANY = ("properties", "patternProperties", *DEFINITIONS)  # keywords whose values are schemas by name
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE = ("items", "additionalItems", "additionalProperties")
_VALUES = ("const", "enum", "default", "examples", "required", "format")
# Keywords next to which an object may have properties that it does not name.
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties", "$ref", *_LISTS}
# A blank, or a new line with its indentation: an end for models that write blanks without one.
OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,32}"}
MOST_CHECKS = 512  # of parts of a schema, to find the one at fault
Check = Callable[[Any], str]  # what is wrong with a schema; empty: nothing


def schema_grammar(schema: Any, *, coerce_one_of: bool = False) -> str:
    """Return the serialized grammar of a schema alone."""
    return json.dumps({"grammars": [schema_rule(schema, coerce_one_of=coerce_one_of)]})


def schema_rule(schema: Any, *, coerce_one_of: bool = False) -> dict[str, object]:
    """Return the grammar of a schema. `coerce_one_of`: schemas in `oneOf` need not exclude each other."""
    given = {"enum": []} if schema is False else {} if schema is True else enforced(schema)
    return {"json_schema": {**given, "x-guidance": {**OPTIONS, "coerce_one_of": coerce_one_of}}}


def enforced(schema: Any) -> Any:
    """Return the schema as it is enforced, at any depth: without formats that are not known, and with objects closed.

    An object that names its properties has no others unless it says so, and has those whose only value is their
    default: every such reply is valid, and small models do not lose themselves in names of their own. `oneOf` of
    schemas that exclude each other is `anyOf`.
    """
    return _enforced(schema, schema)


def _enforced(schema: Any, root: Any) -> Any:
    if isinstance(schema, list):
        return [_enforced(each, root) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _enforced_part(key, value, root) for key, value in schema.items() if key != "x-guidance"}
    if found.get("format") not in (None, *FORMATS):
        del found["format"]
    if found.get("properties") and not _OPEN & found.keys():
        found["additionalProperties"] = False
    if isinstance(schema.get("properties"), Mapping) and isinstance(required := schema.get("required", []), list):
        known = {each for each in required if isinstance(each, str)}
        said = [name for name in schema["properties"] if needs_default(schema, name) and name not in known]
        found |= {"required": [*said, *required]} if said else {}
    if isinstance(schema.get("oneOf"), list) and "anyOf" not in schema and exclusive(schema["oneOf"], root):
        found["anyOf"] = found.pop("oneOf")
    return found


def _enforced_part(key: str, value: Any, root: Any) -> Any:
    if key in _MANY and isinstance(value, Mapping):
        return {name: _enforced(each, root) for name, each in value.items()}
    # Schemas that hold together would exclude each other's properties if they were closed.
    return value if key in _VALUES or key == "allOf" else _enforced(value, root)


def fault(schema: Any, check: Check) -> tuple[str, str]:
    """Return the path in the schema of the innermost part that fails by itself, and what is wrong with it."""
    path, message, left = "", check(schema), MOST_CHECKS
    shared = {key: schema[key] for key in DEFINITIONS if isinstance(schema, Mapping) and key in schema}
    found = schema
    while True:
        for key, part in parts(found):
            left -= 1
            alone = {**shared, **part} if isinstance(part, Mapping) else part
            wrong = check(alone) if left >= 0 else ""
            if wrong:
                path, message, found = f"{path}.{key}".removeprefix("."), wrong, part
                break
        else:
            return path, message


def repeats(schema: Any) -> bool:
    """Whether a reply could have fewer properties than some part asks for: the library counts a name that comes twice
    as two, unless the part lists all names."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping) and "minProperties" in part:
            least, required = part["minProperties"], part.get("required")
            named = len(required) if isinstance(required, list) else 0
            is_open = part.get("additionalProperties") is not False or bool(part.get("patternProperties"))
            if is_open and isinstance(least, int) and least > max(1, named):
                return True
        left += [each for _, each in parts(part)]
    return False


def parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside a schema with their paths; definitions come last: others refer to them."""
    if not isinstance(schema, Mapping):
        return
    for key in (*_ONE, *_LISTS, *_MANY):
        inside = schema.get(key)
        if key in _ONE and isinstance(inside, Mapping):
            yield key, inside
        elif key not in _MANY and isinstance(inside, list):
            yield from ((f"{key}[{at}]", each) for at, each in enumerate(inside))
        elif key in _MANY and isinstance(inside, Mapping):
            yield from ((f"{key}.{name}", each) for name, each in inside.items())
