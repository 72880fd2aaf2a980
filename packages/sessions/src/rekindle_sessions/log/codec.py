"""Encode values of a session as JSON, and decode them.

Decoding validates against the types' annotations: a row that does not match raises ValueError, never yields a partial
value.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from types import GenericAlias
from typing import Any, TypeVar, cast, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rekindle.errors import BadRequest, RekindleError
from rekindle_sessions.machine.types import Event, MessagePosted, Plan

T = TypeVar("T")
_STORED_KINDS: dict[type[Any], str] = {kind: kind.__name__ for kind in get_args(Event)} | {MessagePosted: "Told"}
EVENTS: dict[str, type[Any]] = {stored: kind for kind, stored in _STORED_KINDS.items()}


def packed(value: Any) -> str:
    """Encode a value, or a dict of values, as JSON text."""
    plain = {name: asdict(each) for name, each in value.items()} if isinstance(value, dict) else asdict(value)
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def unpacked(kind: type[T], text: str | bytes) -> T:
    """Decode what `packed` wrote; ValueError if the text is no value of type `kind`."""
    try:
        return cast(T, _read(kind, text))
    except ValidationError as error:
        raise ValueError(": ".join(_problem(error))) from error
    except RekindleError as error:
        raise ValueError(str(error)) from error


def packed_event(event: Event) -> tuple[str, str]:
    """Encode an event as its kind and its JSON body."""
    return _STORED_KINDS[type(event)], packed(event)


def unpacked_event(kind: str, text: str) -> Event:
    """Decode what `packed_event` wrote; ValueError for anything else."""
    if kind not in EVENTS:
        raise ValueError(f"{kind!r} is no kind of event")
    return cast(Event, unpacked(EVENTS[kind], text))


def check_readable(value: Any) -> None:
    """Raise BadRequest, with the field's name, if a value could not be read back from the file."""
    for name, each in asdict(value).items():
        try:
            json.dumps(each, ensure_ascii=False).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise BadRequest(f"{name} cannot be kept: {error}", param=name) from error
    try:
        _read(type(value), packed(value))
    except ValidationError as error:
        name, reason = _problem(error)
        raise BadRequest(f"{name} cannot be kept: {reason}", param=name.partition(".")[0]) from error


def _read(kind: Any, text: str | bytes) -> Any:
    value = _reader(kind)(b"[%b]" % text if isinstance(text, bytes) else f"[{text}]")[0]
    if isinstance(value, Plan):  # options may be of any type: lists were tuples
        return replace(value, sampling=tuple((name, _frozen(each)) for name, each in value.sampling))
    return value


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@cache
def _reader(kind: type[Any]) -> Callable[[str | bytes], Any]:
    """Return what reads a list of one value: pydantic takes settings for a list, not for a dataclass alone."""
    one: Any = GenericAlias(tuple, (kind,))
    return TypeAdapter(one, config=ConfigDict(extra="forbid", strict=True)).validate_json


def _problem(error: ValidationError) -> tuple[str, str]:
    """Return the field of the first error, and what is wrong with it."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ".".join(map(str, first["loc"][1:])), first["msg"]
