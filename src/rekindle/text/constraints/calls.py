"""Grammars of calls: the name of a tool that there is, and arguments of its schema, in JSON or in tags.

Owns how a `CallLayout` is written in the notation of llguidance. Blanks may differ from the template's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.text.constraints.types import Calls
from rekindle.text.replies.reader import CallLayout, CallMarks

TEXT = "/(?s:.)*/"
BLANK = "/[ \\t\\r\\n]/"
BLANKS = "/[ \\t\\r\\n]{0,8}/"
DELETE = "\x7f"  # which the notation does not take as it is
EXACT_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_CALL_ID = r'/,[ ]?"id":[ ]?"[\w\-]{1,64}"/'
Pieces = Callable[[str], Sequence[str | int]]  # structured text -> texts and ids of control tokens


def literal(text: str) -> str:
    """Return text as a term."""
    return json.dumps(text, ensure_ascii=False).replace(DELETE, "\\u007f")


def any_but(tokens: Collection[int], ends: Collection[int]) -> str:
    """Return a term for any tokens but these and those that end a reply."""
    without = sorted({*tokens, *ends})
    return f"<[^{','.join(map(str, without))}]>*" if without else "<[*]>*"


def first_token(text: str, pieces: Pieces) -> tuple[int | None, str]:
    """Return the first control token in structured text, and the text from there on; None and nothing: it has none."""
    before = 0
    for piece in pieces(text):
        if isinstance(piece, int):
            return piece, text[before:]
        before += len(piece)
    return None, ""


def terms(text: str, pieces: Pieces) -> str:
    """Return structured text as terms of a rule: its control tokens by their ids."""
    return " ".join(f"<[{piece}]>" if isinstance(piece, int) else literal(piece) for piece in pieces(text))


@dataclass(frozen=True, slots=True)
class ArgumentRules:
    """The arguments of a tool: a term for the rules of its calls, rules of its own, and grammars by their names."""

    term: str
    rules: tuple[str, ...]
    grammars: Mapping[str, Mapping[str, Any]]


def json_arguments(index: int, grammar: Mapping[str, Any], *, blanks: str = BLANKS) -> ArgumentRules:
    """Return the arguments of tool `index` as JSON of this grammar, after `blanks`."""
    name = f"arguments_{index}"
    return ArgumentRules(f"{blanks} @{name}", (), {name: grammar})


def exact_arguments(index: int, grammar: Mapping[str, Any]) -> ArgumentRules:
    """Return the same with the blanks that `json.dumps` writes and no others: a client that parses arguments sends
    them back as they were."""
    schema = grammar["json_schema"]
    schema = {**schema, "x-guidance": {**_kept(schema["x-guidance"]), **EXACT_OPTIONS}}
    return json_arguments(index, {"json_schema": schema}, blanks='" "')


def _kept(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "whitespace_pattern"}


@dataclass(frozen=True, slots=True)
class CallRules:
    """The rules of the calls that a reply may have; `arguments` are those of the tools, in their order."""

    calls: Calls
    arguments: Sequence[ArgumentRules]
    layout: CallLayout
    marks: CallMarks
    pieces: Pieces
    ends: Collection[int]  # ids that end a reply

    def forced(self, opening: str) -> list[str]:
        """Return the rules of a reply of which the prompt has begun a call, with `opening`."""
        names = [tool.name for tool in self.calls.tools]
        if self.calls.name is not None:
            number = "/[0-9]+/" if self.layout.number else ""
            middle = self._loose(self.layout.middle) if self.layout.number else ""
            begun = f"{number} {middle} {self._arguments(names.index(self.calls.name))}"
        else:
            whole = self.layout.begin + self.layout.head
            begun = f"{self._loose(whole.removeprefix(opening))} named"
        return [f"start: {begun} further", *self._shared()]

    def free(self, thought: str) -> list[str]:
        """Return the rules of a reply of any text, with calls; `thought` comes first. Text with the mark of a call has
        one."""
        head = self.layout.begin + self.layout.head
        if not self.marks.open:
            # Up to its first blank: there a call's first term ends, and no text may go on that begins like it.
            pattern = re.escape(head.split()[0]).replace("/", "\\/")
            tag = f"({terms(self.marks.tag, self.pieces)})? " if self.marks.tag else ""
            return [
                f"start: {thought} (OTHER | {tag}call)",
                f"OTHER: {TEXT} & ~/\\s*{pattern}(?s:.*)/",
                *self.alone(),
            ]
        token, _ = first_token(self.marks.open, self.pieces)
        if token is not None:  # what the mark has before it is text like any other
            other = any_but((token,), self.ends)
            call = f"{self._loose(first_token(head, self.pieces)[1])} named further"
            return [f"start: {thought} (begun {call})* {other}", f"begun: {other}", *self._shared()]
        opened, tag = self.marks.open, self.marks.tag
        whole = f"begun {self._loose(head.removeprefix(opened))} named further"
        other = " | tagged named further" if tag else ""
        return [
            f"start: {thought} ({whole}{other} | {TEXT})"
            if self.layout.exact
            else f"start: {thought} ({whole}{other})* {TEXT}",
            f"begun[suffix={literal(opened)}]: {TEXT}",  # the shortest: no other text goes past the mark
            *([f"tagged[suffix={literal(tag)}]: {TEXT}"] if tag else []),
            *self._shared(),
        ]

    def alone(self) -> list[str]:
        """Return the rules of `call`: one or several calls and nothing else."""
        return [f"call: {self._loose(self.layout.begin + self.layout.head)} named further", *self._shared()]

    def _shared(self) -> list[str]:
        """Return the rules of `named`, a call after its head, and of `further` calls up to the end of all."""
        layout = self.layout
        is_id = f"({terms(layout.id_mark, self.pieces)} /[\\w\\-]*/)?" if layout.id_mark else ""
        number = '":" /[0-9]+/' if layout.number else ""
        rules = [f"named: {' | '.join(f'tool_{index}' for index in range(len(self.calls.tools)))}"]
        for index, tool in enumerate(self.calls.tools):
            name = literal(layout.escape(tool.name))
            middle = self._loose(layout.middle)
            if layout.middle[:1].isspace() and layout.tags is None:  # else the name would go on
                middle = f"{BLANK}{middle}"
            rules.append(f"tool_{index}: {name} {is_id} {number} {middle} {self._arguments(index)}")
        more = f"({self._loose(layout.joint + layout.head)} named)*" if self._has_more else ""
        rules += [rule for each in self.arguments for rule in each.rules]
        return [*rules, f'further: {more} {self._loose(layout.end)} ""']

    @property
    def _has_more(self) -> bool:
        return self.calls.parallel and not self.layout.only_one

    def _arguments(self, index: int) -> str:
        call_id = f"({_CALL_ID})? " if self.layout.has_id else ""
        return f"{self.arguments[index].term} {call_id}{self._loose(self.layout.tail)}"

    def _loose(self, text: str) -> str:
        """Return structured text as terms, with any blanks where it has some."""
        if self.layout.exact:
            return terms(text, self.pieces)
        parts = re.split(r"\s+", text)
        return f" {BLANKS} ".join(terms(part, self.pieces) for part in parts)
