"""Whether schemas in `oneOf` exclude each other, so that they are the same in `anyOf`.

The grammar library sees that where none of them is a reference. What cannot be seen here counts as overlapping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.text.constraints.satisfiable import resolved
from rekindle.text.replies.arguments import kind_of_value

MOST_NAMES = 64  # properties and listed values of a schema that are looked at
MOST_TAGS = 4  # of these properties, that may be what distinguishes schemas


def exclusive(schemas: Sequence[Any], root: Any) -> bool:
    """Whether no value satisfies two of these schemas, as far as their types show, or a property that objects need.

    References are to `root`. Takes time for the number of schemas, however large those are that they refer to.
    """
    found = [_target(each, root) for each in schemas]
    types = [_types(each) for each in found]
    objects = [each for each, some in zip(found, types, strict=True) if some == {"object"}]
    others = [kind for some in types if some != {"object"} for kind in some]
    if not all(types) or len(set(others)) < len(others) or (objects and "object" in others):
        return False
    if len(objects) < 2:
        return True
    names = list(objects[0].get("properties") or ())[:MOST_NAMES]
    tags = [name for name in names if _values(objects[0], name)]
    return any(_differ(objects, name) for name in tags[:MOST_TAGS])


def needs_default(schema: Mapping[str, Any], name: str) -> bool:
    """Whether the only value of a property is its default, as of a `kind` in Pydantic's schemas: it is always said."""
    part = schema["properties"].get(name)
    return isinstance(part, Mapping) and "const" in part and "default" in part and "maxProperties" not in schema


def _target(schema: Any, root: Any) -> Any:
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    return resolved(root, reference) if isinstance(reference, str) else schema


def _types(schema: Any) -> set[str]:
    """Return the types that values of a schema have at most; none for those that are not known."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type", [kind_of_value(each) for each in _listed(schema)])
    types = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    few = types if len(types) <= MOST_NAMES else []
    return {"number" if kind == "integer" else kind for kind in few if isinstance(kind, str)}


def _differ(objects: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Whether all of these need a property, none with a value that another one has."""
    seen: set[str] = set()
    for each in objects:
        values = _values(each, name)
        if not values or not seen.isdisjoint(values):
            return False
        seen |= values
    return True


def _values(schema: Mapping[str, Any], name: str) -> set[str]:
    """Return the texts that a property must be one of; none if it need not be there, or may be something else."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return set()
    values = _listed(properties.get(name))
    is_needed = name in required[:MOST_NAMES] or needs_default(schema, name)
    return set(values) if is_needed and all(isinstance(each, str) for each in values) else set()


def _listed(schema: Any) -> list[Any]:
    """Return the values that a schema lists; none for one that does not, or lists many."""
    if not isinstance(schema, Mapping):
        return []
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed if isinstance(listed, list) and len(listed) <= MOST_NAMES else []
