"""Validation of JSON bodies against models, for every dialect.

A parameter that is known to change the answer and is not implemented is refused by name. Others that are not known are
ignored and named in the answer, or refused where the server is strict. null means "not given".
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

from rekindle.errors import BadRequest, quoted
from rekindle.server.border import MOST_KEYS
from rekindle.text.messages import sound_values
from rekindle.text.omissions import REFUSE, Omissions

# OpenAI's parameters for naming, billing or routing; no answer depends on them.
HARMLESS = frozenset(
    "metadata prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier store "
    "user".split()
)
# Not implemented, but harmless at the value that means "off".
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "suffix": ("",),
}
MOST_UNKNOWN = 32  # rounds of leaving out unknown keys inside parameters
OWN = "rekindle"  # our own parameter, whose keys are known
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
    omissions: Omissions = REFUSE,
    harmless: Collection[str] = HARMLESS,
    neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL,
) -> Body:
    """Parse the body as `kind`; BadRequest names what is wrong.

    `harmless` parameters cannot change the answer, `neutral` ones not at these values; what is not known goes to
    `omissions`.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    body = sound_values(body, omissions)
    given = {name: value for name, value in body.items() if value is not None and name not in harmless}
    for name, off in neutral.items():
        if name in given and given.pop(name) not in off:
            raise BadRequest(f"{name}: {short(body[name])} is not supported; leave it out", param=name)
    for name in [name for name in given if name not in kind.model_fields]:
        omissions.parameter(name)
        del given[name]
    crowded = next((name for name, value in given.items() if isinstance(value, dict) and len(value) > MOST_KEYS), None)
    if crowded is not None:
        raise BadRequest(f"{crowded} has more than {MOST_KEYS} keys", param=crowded)
    given = {name: _as_wanted(value, kind.model_fields[name].annotation) for name, value in given.items()}
    for _ in range(MOST_UNKNOWN):
        try:
            return kind.model_validate(given)
        except ValidationError as error:
            refused = error
        given = _without_unknown(given, refused, omissions)
    raise BadRequest(f"the parameters have more than {MOST_UNKNOWN} unknown keys: leave them out")


def _as_wanted(value: Any, annotation: Any) -> Any:
    """Return a whole number written as 16.0, as some languages serialize all numbers, where only integers fit."""
    if type(value) is not float or not value.is_integer():
        return value
    kinds = _types_in(annotation)
    return int(value) if int in kinds and float not in kinds else value


def _types_in(annotation: Any) -> list[Any]:
    inside = get_args(annotation)
    return [each for part in inside for each in _types_in(part)] if inside else [annotation]


def _without_unknown(given: dict[str, Any], error: ValidationError, omissions: Omissions) -> dict[str, Any]:
    """Return the parameters without the keys inside them that nobody knows; BadRequest if something else is wrong."""
    errors = error.errors(include_url=False, include_input=False)
    unknown = [each["loc"] for each in errors if each["type"] == "extra_forbidden" and each["loc"][0] != OWN]
    if not unknown:
        raise _refusal(error)
    given = deepcopy(given)
    for *path, name in unknown:
        holder = _inside(given, path)
        if isinstance(holder, dict) and name in holder:  # not yet removed for another type of a union
            del holder[name]
            omissions.parameter(_path((*path, name)))
    return given


def _inside(value: Any, path: Sequence[int | str]) -> Any:
    """Return the value at a path of pydantic's, some of whose steps are names of types in a union."""
    for step in path:
        if isinstance(value, dict):
            value = value.get(step, value)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step]
    return value


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
    return textwrap.shorten(quoted(value), 80)
