"""The work a template may do: how much of it is left, and what an operation on values of a given size costs.

A unit is a character produced or read, some ten nanoseconds; what takes longer or holds more costs more units in
proportion. Everything is charged before it is done, by the size of the input and an upper bound of the output, so no
operation allocates more than the allowance. Counts only: no clock, the same on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Sized, ValuesView
from typing import Any

import jinja2
import jinja2.utils

STEP = 32  # an iteration, and one more for each node inside it
CALL = 64  # of a filter or a function
ENTRY = 256  # into a macro, a block or a recursive loop, with its buffer
ELEMENT = 8  # of a list that is copied, as many bytes
NODE = 64  # of nested values that are traversed
SLOW = 16  # units per character, in regular expressions or loops in Python
# Methods of texts that read each character once and return no more than the text.
LINEAR = frozenset(
    ("startswith", "endswith", "strip", "lstrip", "rstrip", "lower", "upper", "removeprefix", "removesuffix", "find")
)
MOST_BITS = 1 << 16  # of an integer: no operation on two of them takes long
MOST_PRECISION = 1_000

_WIDTHS = re.compile(r"\d+")
_PRINTF = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d+)?(?:\.(\*|\d+))?")


class Exceeded(jinja2.TemplateRuntimeError):
    """The template would do more work, or write more, than it may."""


class Meter:
    """The rest of an allowance of work; `charge` raises Exceeded if it is not enough."""

    __slots__ = ("left", "nests")

    def __init__(self, allowance: int) -> None:
        self.left = allowance
        self.nests = False  # whether one list or mapping may be in several places; never so in what callers send

    def charge(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise Exceeded("it takes more work than a template may do")

    def sized(self, value: Any) -> int:
        """Count the characters and elements of a value and its contents, each as often as it occurs."""
        total = 0
        rest = [value]
        while rest:
            total += NODE * len(rest)
            if total > self.left:
                self.charge(total)
            deeper: list[Any] = []
            for item in rest:
                kind = type(item)
                if kind is str:
                    total += len(item)
                elif kind is list:
                    deeper += item
                elif kind is dict:
                    deeper += item
                    deeper += item.values()
                elif kind is not bool and kind is not type(None):
                    total += _spread(item, deeper)
            rest = deeper
        return total

    def all_of(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the same values, each charged as a step."""
        for value in values:
            self.charge(STEP)
            yield value


def _spread(item: Any, deeper: list[Any]) -> int:
    """Return the cost of a value itself; add its contents to `deeper`."""
    if isinstance(item, str | bytes):
        return len(item)
    if isinstance(item, int):
        return item.bit_length() // ELEMENT
    if isinstance(item, range):
        return ELEMENT * len(item)
    if isinstance(item, Mapping):
        deeper += [*item.keys(), *item.values()]
    elif isinstance(item, list | tuple | set | frozenset | ItemsView | KeysView | ValuesView):
        deeper += item
    elif isinstance(item, jinja2.utils.Namespace):
        deeper.append(object.__getattribute__(item, "_Namespace__attrs"))
    return 0


def compute(meter: Meter, operator: str, values: tuple[Any, Any], work: Callable[[Any, Any], Any]) -> Any:
    """Charge `left operator right`, then compute it. Raises OverflowError for numbers of too many bits."""
    left, right = values
    if isinstance(left, int) and isinstance(right, int):
        bits, others = left.bit_length(), right.bit_length()
        result = bits * max(right, 1) if operator == "**" else bits + others if operator == "*" else max(bits, others)
        if result > MOST_BITS:
            raise OverflowError(f"a number of more than {MOST_BITS} bits")
        meter.charge(ELEMENT)
    elif operator == "*" and isinstance(right if isinstance(left, int) else left, Sequence):
        meter.nests = True
        times, repeated = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(times, int):
            meter.charge(max(times, 0) * flat(repeated))
    elif operator == "%" and isinstance(left, str | bytes):
        meter.charge(_printed(meter, left, right))
    else:
        meter.nests |= isinstance(left, list | tuple)
        meter.charge(flat(left) + flat(right))
    return work(left, right)


def flat(value: Any) -> int:
    """Units of a shallow copy of a value."""
    if isinstance(value, str | bytes):
        return len(value) + ELEMENT
    return ELEMENT * (1 + len(value)) if isinstance(value, Sized) else ELEMENT


def _printed(meter: Meter, form: str | bytes, values: Any) -> int:
    """The most characters of a text after `%` formatting."""
    text = form.decode("latin-1") if isinstance(form, bytes) else form
    given = values if isinstance(values, tuple) else (values,)
    most = max((abs(value) for value in given if isinstance(value, int)), default=0)
    total = len(text) + meter.sized(values)
    for width, precision in _PRINTF.findall(text):
        total += sum(most if part == "*" else _number(part) for part in (width, precision) if part)
        if isinstance(values, Mapping):
            total += meter.sized(values)
        if total > meter.left:
            break
    return total


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 16 else 10**16


def padding(spec: str) -> int:
    """The most characters that a format such as `{:>80}` adds to a value."""
    return sum(_number(digits) for digits in _WIDTHS.findall(spec))


def replaced(text: str, old: str, new: str) -> int:
    """The most characters of `text` with every `old` replaced by `new`."""
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def compared(meter: Meter, left: Any, operator: str, right: Any) -> int:
    """The cost of comparing two values, or of looking for one in the other."""
    if operator in ("in", "notin"):
        if isinstance(right, Mapping | set | frozenset):
            return ELEMENT + (meter.sized(left) if isinstance(left, tuple) else 0)
        if isinstance(right, list | tuple) and not isinstance(left, list | tuple | Mapping):
            return len(right) * flat(left)
        return min(meter.sized(right), len(right)) if isinstance(right, str | bytes) else meter.sized(right)
    if isinstance(left, str) or isinstance(right, str):
        return min(flat(left), flat(right))
    if isinstance(left, int | float | None) or isinstance(right, int | float | None):
        return ELEMENT
    return min(meter.sized(left), meter.sized(right))


def method(meter: Meter, name: str, owner: Any, given: list[Any]) -> int:
    """The cost of a method of a built-in value; `given` are its arguments, in order."""
    if isinstance(owner, str | bytes):
        return len(owner) + _of_text(meter, name, owner, given)
    if isinstance(owner, int):
        return owner.bit_length() + sum(abs(value) for value in given if isinstance(value, int))
    if name in ("index", "count"):
        return meter.sized(owner)
    return ELEMENT if name in ("get", "items", "keys", "values") else flat(owner)


def _of_text(meter: Meter, name: str, owner: Any, given: list[Any]) -> int:
    """The cost of methods of text and bytes that are not bounded by the text alone."""
    sizes = [abs(value) for value in given if isinstance(value, int)]
    if name in ("center", "ljust", "rjust", "zfill"):
        return max(sizes, default=0)
    if name == "expandtabs":
        return (len(owner.split("\t" if isinstance(owner, str) else b"\t")) - 1) * max(sizes, default=ELEMENT)
    if name == "replace" and len(given) > 1 and all(isinstance(value, type(owner)) for value in given[:2]):
        return replaced(owner, given[0], given[1])
    if name == "join" and given:
        return meter.sized(given[0]) + len(owner) * (len(given[0]) if isinstance(given[0], Sized) else 0)
    if name == "translate" and given:
        most = given[0].values() if isinstance(given[0], Mapping) else ()
        return len(owner) * max((len(value) for value in most if isinstance(value, str)), default=1)
    if name in ("split", "rsplit"):
        apart = given[0] if given and isinstance(given[0], type(owner)) and given[0] else None
        return 2 * ELEMENT * (owner.count(apart) if apart is not None else len(owner) // 2)
    if name == "splitlines":
        return ELEMENT * len(owner)
    return len(owner) * SLOW if name in ("casefold", "title", "hex") else 0
