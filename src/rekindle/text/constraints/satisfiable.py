"""Whether any value can satisfy a schema whose parts refer to each other: a least fixpoint over its references.

A definition that needs itself in every value, such as a list node whose `next` is required, has none: a grammar of it
compiles, and its replies get stuck or never end. What cannot be known from the structure counts as satisfiable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

UNRESOLVED = object()


def is_satisfiable(schema: Any) -> bool:
    """Whether some finite value satisfies a schema. Takes time for the square of its references at most."""
    known: dict[str, bool] = {}  # references, and whether a value is known for what they name
    while True:
        before = dict(known)
        found = _has_value(schema, known)
        for reference in list(known):
            target = resolved(schema, reference)
            known[reference] = target is UNRESOLVED or _has_value(target, known)
        if known == before:
            return found


def _has_value(schema: Any, known: dict[str, bool]) -> bool:
    """Whether a schema has a value, if of the references only those have that are known to."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        return True
    if schema.get("enum") == []:
        return False
    reference = schema.get("$ref")
    if isinstance(reference, str) and not known.setdefault(reference, False):
        return False
    every, some = schema.get("allOf"), (schema.get("anyOf"), schema.get("oneOf"))
    if isinstance(every, list) and not all(_has_value(each, known) for each in every):
        return False
    if any(isinstance(each, list) and each and not any(_has_value(one, known) for one in each) for each in some):
        return False
    return all(_has_value(part, known) for part in _needed(schema))


def _needed(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of what every value has inside: required properties, or the first items."""
    kind, properties, required = schema.get("type"), schema.get("properties"), schema.get("required")
    if kind == "object" and isinstance(properties, Mapping) and isinstance(required, list):
        return [properties[key] for key in required if isinstance(key, str) and key in properties]
    least = schema.get("minItems")
    if kind == "array" and isinstance(least, int) and least > 0:
        first = schema.get("prefixItems")
        named = first[:least] if isinstance(first, list) else []
        return [*named, schema["items"]] if len(named) < least and "items" in schema else named
    return []


def resolved(schema: Any, reference: str) -> Any:
    """Return what a reference inside the schema names."""
    if not reference.startswith("#"):
        return UNRESOLVED
    found = schema
    for key in unquote(reference[1:]).split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return UNRESOLVED
    return found
