"""Validation of JSON bodies against models, for every dialect.

A parameter that would change the answer and is not implemented is refused by name; the few that cannot change it are
ignored. null means "not given", but only for known parameters.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

from rekindle.errors import BadRequest

# OpenAI's parameters for naming, billing or routing; no answer depends on them.
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
MAX_NAME_CHARS = 100  # of a parameter's name, in error messages
Body = TypeVar("Body", bound=BaseModel)
Item = TypeVar("Item")


class StrictModel(BaseModel):
    """A body or an answer without unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class OpenModel(BaseModel):
    """Allows further fields, which clients or later versions may add."""

    model_config = ConfigDict(extra="allow", strict=True)


class _FirstOnly(FailFast):
    """Stops at the first invalid item: a long list must not produce as many errors."""

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
    """Parse the body as `kind`, ignoring parameters that cannot change the answer; BadRequest names what is wrong."""
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
    """Describe the first error; for a parameter of several types, what each type requires."""
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
    """Return the path in the body, without the union types that pydantic adds."""
    parts = (str(part)[:MAX_NAME_CHARS] for part in place)
    return ".".join(part for part in parts if part not in ("str", "int") and "[" not in part)


def short(value: Any) -> str:
    """Shorten a value for an error message."""
    return textwrap.shorten(repr(value), 80)
