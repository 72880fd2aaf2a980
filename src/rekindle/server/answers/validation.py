"""From a JSON body to a model of it, whatever the dialect.

A parameter that would change the answer and is not implemented is refused by name; a short list that cannot change it
is ignored. null means "not given", but only of a parameter that is known.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, FailFast, ValidationError

from rekindle.errors import BadRequest

# Of OpenAI's names: they name, bill or route; no answer depends on them.
HARMLESS = frozenset(
    "metadata prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier store "
    "user".split()
)
# Not implemented, but harmless at the value that means "off".
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "verbosity": ("medium",),
}
MAX_KEYS = 1024  # of an object inside the body
MAX_NAME_CHARS = 100  # of a parameter, in characters, as far as errors repeat it
Body = TypeVar("Body", bound=BaseModel)
Item = TypeVar("Item")


class _FirstOnly(FailFast):
    """One wrong item says it all: a long list of them is not to become as many errors."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)  # unions of types are sets of them


Items = Annotated[list[Item], _FirstOnly()]


def validated(
    kind: type[Body],
    body: Any,
    *,
    harmless: Collection[str] = HARMLESS,
    neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL,
) -> Body:
    """The body as `kind` describes it, without what cannot change the answer; BadRequest names what is wrong."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    unset = {name for name in (*kind.model_fields, *neutral) if body.get(name) is None}
    given = {name: value for name, value in body.items() if name not in unset and name not in harmless}
    for name, off in neutral.items():
        if name in given and given.pop(name) not in off:
            raise BadRequest(f"{name}: {short(body[name])} is not supported; leave it out", param=name)
    unknown = next((name for name in given if name not in kind.model_fields), None)
    if unknown is not None:
        raise _unknown(unknown)
    crowded = next((name for name, value in given.items() if isinstance(value, dict) and len(value) > MAX_KEYS), None)
    if crowded is not None:
        raise BadRequest(f"{crowded} has more than {MAX_KEYS} keys", param=crowded)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> BadRequest:
    """The first thing that is wrong; of a parameter with several types, what each of them would need."""
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]
    name = _path(first["loc"]) or None
    if first["type"] == "extra_forbidden" and name is not None:
        return _unknown(name)
    same = [each["msg"] for each in errors if each["loc"][:1] == first["loc"][:1] and _path(each["loc"]) == name]
    return BadRequest(f"{name}: {', or '.join(dict.fromkeys(same))}", param=name)


def _unknown(name: str) -> BadRequest:
    name = name[:MAX_NAME_CHARS]
    return BadRequest(f"unknown parameter {name!r}: it is not supported here", param=name)


def _path(place: Sequence[int | str]) -> str:
    """Where in the body; pydantic adds the types of a union to its places."""
    parts = (str(part)[:MAX_NAME_CHARS] for part in place)
    return ".".join(part for part in parts if part not in ("str", "int") and "[" not in part)


def short(value: Any) -> str:
    """A value as errors quote it."""
    return textwrap.shorten(repr(value), 80)
