"""Jinja's filters, each charged before it runs.

Owns the cost of every filter, by name. One that is not listed costs `SLOW` units for each character and element of its
input, which is enough for any filter whose output is no longer than its input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2.runtime import Context
from jinja2.utils import _PassArg

from rekindle.text.metering import CALL, ELEMENT, MOST_PRECISION, NODE, SLOW, Meter, padding, replaced

Cost = Callable[[Meter, Any, list[Any]], int]

# Filters that pass elements on one by one: charged for each element.
LAZY = frozenset(("batch", "map", "reject", "rejectattr", "select", "selectattr", "slice", "unique"))
_COPIES = (
    "capitalize", "escape", "e", "forceescape", "float", "int", "lower", "list", "reverse", "string", "trim", "upper",
)  # fmt: skip
# Filters that take constant time.
FREE = frozenset(
    ("abs", "attr", "count", "d", "default", "filesizeformat", "first", "last", "length", "random", "safe")
)


def _nothing(meter: Meter, value: Any, given: list[Any]) -> int:
    return 0


def _batched(meter: Meter, value: Any, given: list[Any]) -> int:
    meter.nests = True
    return _parts(meter, value, given)


def _copy(meter: Meter, value: Any, given: list[Any]) -> int:
    return len(value) if isinstance(value, str) else meter.sized(value)


def _slow(meter: Meter, value: Any, given: list[Any]) -> int:
    return SLOW * meter.sized(value) + sum(map(meter.sized, given))


def _whole(given: list[Any]) -> int:
    return max((abs(value) for value in given if isinstance(value, int)), default=0)


def _center(meter: Meter, value: Any, given: list[Any]) -> int:
    return meter.sized(value) + _whole(given)


def _parts(meter: Meter, value: Any, given: list[Any]) -> int:
    return NODE * _whole(given)


def _indented(meter: Meter, value: Any, given: list[Any]) -> int:
    width = len(given[0]) if given and isinstance(given[0], str) else _whole(given[:1])
    lines = value.count("\n") + 1 if isinstance(value, str) else meter.sized(value)
    return 2 * ELEMENT * meter.sized(value) + lines * width


def _replaced(meter: Meter, value: Any, given: list[Any]) -> int:
    if isinstance(value, str) and len(given) > 1 and isinstance(given[0], str) and isinstance(given[1], str):
        return replaced(value, given[0], given[1])
    return meter.sized(value) * (1 + sum(map(meter.sized, given)))


def _joined(meter: Meter, value: Any, given: list[Any]) -> int:
    between = meter.sized(given[0]) if given else 0
    return meter.sized(value) + between * (len(value) if hasattr(value, "__len__") else 0)


def _formatted(meter: Meter, value: Any, given: list[Any]) -> int:
    text = value if isinstance(value, str) else str(value) if isinstance(value, int | float) else ""
    return padding(text) + _whole(given) * text.count("*") + text.count("%") * sum(map(meter.sized, given)) + len(text)


def _wrapped(meter: Meter, value: Any, given: list[Any]) -> int:
    return SLOW * meter.sized(value) * (1 + sum(len(item) for item in given if isinstance(item, str)))


def _rounded(meter: Meter, value: Any, given: list[Any]) -> int:
    if _whole(given) > MOST_PRECISION:
        raise OverflowError(f"a precision of more than {MOST_PRECISION} digits")
    return ELEMENT


def _json(meter: Meter, value: Any, given: list[Any]) -> int:
    """Every element may be on a separate line, indented by its depth."""
    if not given and not meter.nests:
        return 0  # as long as what a caller sent, and charged by its output
    indent = next((item for item in given if isinstance(item, int | str) and not isinstance(item, bool)), 0)
    size = meter.sized(value)
    width = len(indent) if isinstance(indent, str) else abs(indent)
    return 2 * size + size // NODE * width * _depth(meter, value)


def _depth(meter: Meter, value: Any) -> int:
    most = 0
    rest = [(value, 1)]
    while rest:
        item, depth = rest.pop()
        most = max(most, depth)
        inner = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()
        rest.extend((part, depth + 1) for part in inner)
    return most


COSTS: dict[str, Cost] = {
    **dict.fromkeys(LAZY, _nothing),
    **dict.fromkeys(_COPIES, _copy),
    "batch": _batched,
    "slice": _parts,
    "center": _center,
    "format": _formatted,
    "items": _nothing,
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "round": _rounded,
    "tojson": _json,
    "urlize": _wrapped,
    "wordwrap": _wrapped,
}


def metered(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that it is charged to the meter of its context."""
    cost = COSTS.get(name, _slow)
    passes = _PassArg.from_obj(work)
    lazy = name in LAZY
    if name in FREE:
        return work

    @jinja2.pass_context
    @functools.wraps(work)
    def filtered(context: Any, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        meter: Meter = context.meter
        if not lazy and isinstance(value, Iterator):
            value = list(meter.all_of(value))
        meter.charge(CALL + cost(meter, value, [*args, *kwargs.values()] if kwargs else list(args)))
        if lazy and isinstance(value, Iterable):
            value = meter.all_of(value)
        result = work(*_context(passes, context), value, *args, **kwargs)
        if cost is _json:
            meter.charge(len(result))
        return result

    return filtered


def _context(passes: _PassArg | None, context: Context) -> tuple[Any, ...]:
    if passes is _PassArg.context:
        return (context,)
    if passes is _PassArg.eval_context:
        return (context.eval_ctx,)
    return (context.environment,) if passes is _PassArg.environment else ()


@jinja2.pass_context
def added(context: Any, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Jinja's `sum`, each addition charged: with lists, each copies all previous elements."""
    items = context.meter.all_of(values)
    if attribute is not None:
        items = context.environment.filters["map"](context, items, attribute=attribute)
    for item in items:
        start = context.environment.call_binop(context, "+", start, item)
    return start
