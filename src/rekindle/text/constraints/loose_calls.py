"""Grammars of calls whose arguments are neither JSON nor in tags: as in Python, or with bare keys and special quotes.

Owns how these forms are written in the notation of llguidance. A call is whole, of a tool that there is, with any
arguments: no schema is enforced in them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.text.constraints.calls import BLANKS, TEXT, Pieces, literal, terms
from rekindle.text.constraints.types import Calls
from rekindle.text.replies.format import ToolFormat
from rekindle.text.replies.keyed import CALL, KeyedForm
from rekindle.text.replies.pythonic import PythonicForm

_COMMA = f'{BLANKS} "," {BLANKS}'
_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
_PYTHON_NAME = r"/[^\W\d][\w.\-]*/"  # where no tools are known
_KEYED_NAME = r"/[\w.:\/\-]+/"
_KEY = r"/[^\W\d][\w\-]*/"
_PYTHON = (
    f"arguments: {BLANKS} (argument ({_COMMA} argument)*)? {BLANKS}",
    f'argument: {_KEY} {BLANKS} "=" {BLANKS} value',
    f"value: STRING | {_NUMBER} | /None|True|False|null|true|false/ | list | dict",
    f'list: "[" {BLANKS} (value ({_COMMA} value)*)? {BLANKS} "]"',
    f'dict: "{{" {BLANKS} (member ({_COMMA} member)*)? {BLANKS} "}}"',
    f'member: STRING {BLANKS} ":" {BLANKS} value',
    r"""STRING: /"([^"\\\n\r]|\\.)*"|'([^'\\\n\r]|\\.)*'/""",
)


def loose_calls(form: ToolFormat | None, calls: Calls, pieces: Pieces) -> list[str]:
    """Return the rules of `call`: one or several calls and nothing else; none for a form that is not one of these."""
    names = " | ".join(literal(tool.name) for tool in calls.tools)
    if isinstance(form, PythonicForm):
        rules = [f"name: {names or _PYTHON_NAME}", f'one: name {BLANKS} "(" arguments ")"', *_PYTHON]
        return [_in_marks(form, calls, pieces), *rules]
    if isinstance(form, KeyedForm):
        mark, close = terms(form.marks.open, pieces), terms(form.marks.close, pieces)
        more = f"({BLANKS} one)*" if calls.parallel else ""
        call = f'{mark} {BLANKS} "{CALL}" name object {BLANKS} {close}'
        return [f"call: one {more}", f"one: {call}", f"name: {names or _KEYED_NAME}", *_keyed(form.quote, pieces)]
    return []


def _in_marks(form: PythonicForm, calls: Calls, pieces: Pieces) -> str:
    joint = _COMMA if form.lead else "/[ \\t]*[\\r\\n][ \\t\\r\\n]*/"
    listed = f"one ({joint} one)*" if calls.parallel else "one"
    if form.lead:
        listed = f'"{form.lead}" {BLANKS} {listed} {BLANKS} "]"'
    close = terms(form.marks.close, pieces)
    gap = BLANKS if form.marks.gap else ""
    return f"call: {gap} {terms(form.marks.open, pieces)} {BLANKS} {listed} {BLANKS} {close}"


def _keyed(quote: str, pieces: Pieces) -> Sequence[str]:
    """Return the rules of an object with bare keys, and with strings between these marks."""
    mark = terms(quote, pieces)
    is_token = isinstance(next(iter(pieces(quote))), int)  # else no text goes past the mark
    string = [f"string: {mark} {TEXT} {mark}"] if is_token else [f"string: {mark} rest", f"rest[suffix={mark}]: {TEXT}"]
    return [
        *string,
        f"value: string | {_NUMBER} | /true|false|null/ | list | object",
        f'list: "[" {BLANKS} (value ({_COMMA} value)*)? {BLANKS} "]"',
        f'object: "{{" {BLANKS} (member ({_COMMA} member)*)? {BLANKS} "}}"',
        f'member: (string | {_KEY}) {BLANKS} ":" {BLANKS} value',
    ]
