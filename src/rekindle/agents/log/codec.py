"""Encode values of a session as JSON, and decode them.

Decoding validates against the types' annotations: a row that does not match raises ValueError, never yields a partial
value.
"""

from __future__ import annotations

import json
import types
from dataclasses import asdict, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rekindle.agents.machine.types import Event, MessagePosted
from rekindle.errors import BadRequest, RekindleError

T = TypeVar("T")
_HINTS: dict[type[Any], dict[str, Any]] = {}
_STORED_KINDS: dict[type[Any], str] = {kind: kind.__name__ for kind in get_args(Event)} | {MessagePosted: "Told"}
EVENTS: dict[str, type[Any]] = {stored: kind for kind, stored in _STORED_KINDS.items()}


def packed(value: Any) -> str:
    """Encode a value, or a dict of values, as JSON text."""
    plain = {name: asdict(each) for name, each in value.items()} if isinstance(value, dict) else asdict(value)
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def unpacked(kind: type[T], text: str | bytes) -> T:
    """Decode what `packed` wrote; ValueError if the text is no value of type `kind`."""
    try:
        return cast(T, _read(kind, json.loads(text)))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


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
    for name, hint in _hints(type(value)).items():
        try:
            _read(hint, json.loads(json.dumps(_plain(getattr(value, name)))))
        except (ValueError, TypeError, RecursionError) as error:
            raise BadRequest(f"{name} cannot be kept: {error}", param=name) from error


def _plain(value: Any) -> Any:
    """Convert a field as `asdict` does."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _hints(kind: type[Any]) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = get_type_hints(kind)
    return _HINTS[kind]


def _read(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the annotated type; ValueError if it does not match."""
    if kind is Any:
        return _frozen(value)
    if isinstance(kind, type) and is_dataclass(kind):
        return _read_fields(kind, value)
    origin = get_origin(kind)
    if origin is tuple:
        return _read_tuple(get_args(kind), value)
    if origin is dict:
        return _read_named(get_args(kind)[1], value)
    if origin is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{value!r} is none of {get_args(kind)}")
        return value
    if origin in (Union, types.UnionType):
        return _read_one_of(get_args(kind), value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value


def _read_fields(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is no {kind.__name__}")
    known = {field.name for field in fields(kind)}
    if set(value) - known:
        raise ValueError(f"{kind.__name__} has no {sorted(set(value) - known)}")
    hints = _hints(kind)
    try:
        return kind(**{name: _read(hints[name], each) for name, each in value.items()})
    except (TypeError, RekindleError) as error:
        raise ValueError(str(error)) from error


def _read_tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is no list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_read(kinds[0], each) for each in value)
    if len(kinds) != len(value):
        raise ValueError(f"{value!r} has not {len(kinds)} items")
    return tuple(_read(each, item) for each, item in zip(kinds, value, strict=True))


def _read_named(kind: Any, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} has no names")
    return {name: _read(kind, each) for name, each in value.items()}


def _read_one_of(kinds: tuple[Any, ...], value: Any) -> Any:
    for kind in kinds:
        try:
            return _read(kind, value)
        except ValueError:
            continue
    raise ValueError(f"{value!r} is none of {kinds}")


def _frozen(value: Any) -> Any:
    """Convert lists back to the tuples they were before encoding."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
