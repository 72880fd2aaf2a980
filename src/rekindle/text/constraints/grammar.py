"""Grammars of whole replies: reasoning as the model writes it, then what the constraint says, or a tool call.

Owns how the format of a model's replies (`replies`) is written in the notation of llguidance. Marks that are tokens are
tokens there, by their ids, so no text of a reply is taken for one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rekindle.errors import BadRequest
from rekindle.text.constraints.calls import (
    BLANKS,
    DELETE,
    TEXT,
    CallRules,
    Pieces,
    any_but,
    exact_arguments,
    first_token,
    json_arguments,
    literal,
    terms,
)
from rekindle.text.constraints.schema import schema_rule
from rekindle.text.constraints.tagged import tagged_arguments, unenforced
from rekindle.text.constraints.types import CalledTool, Calls, Constraint
from rekindle.text.replies import ReplyFormat, ThinkingFormat
from rekindle.text.replies.channels import ANALYSIS, ANSWER, ASIDE, ROLE, ChannelForm
from rekindle.text.replies.format import ToolFormat
from rekindle.text.replies.keyed import CALL, KeyedForm
from rekindle.text.replies.pythonic import PythonicForm
from rekindle.text.replies.reader import CallLayout

ANY_OBJECT = {"type": "object"}
MOST_CHARS = 1 << 20  # of a schema or grammar
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


# Grammars of calls whose arguments are neither JSON nor in tags: as in Python, or with bare keys and special quotes.
#
# Owns how these forms are written in the notation of llguidance. A call is whole, of a tool that there is, with any
# arguments: no schema is enforced in them.


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


def answer_grammar(constraint: Constraint, *, coerce_one_of: bool = False) -> dict[str, object]:
    """Return the grammar of the constrained text alone, of a grammar in Lark's notation; BadRequest if it is malformed.

    `coerce_one_of`: schemas in `oneOf` need not exclude each other.
    """
    kind, value, param = constraint.kind, constraint.value, constraint.param
    if kind == "json":
        if not isinstance(value, dict | bool):
            raise BadRequest(f"{param}: a schema is an object", param=param)
        return schema_rule(value, coerce_one_of=coerce_one_of)
    if kind == "choice":
        if not value or not all(isinstance(each, str) and each for each in value):
            raise BadRequest(f"{param}: give at least one text, none of them empty", param=param)
        return {"lark_grammar": f"start: {' | '.join(map(literal, value))}"}
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{param} must be a text that is not empty", param=param)
    if kind == "regex":
        from llguidance import regex_to_lark  # takes a tenth of a second, and few replies are constrained

        try:
            pattern = regex_to_lark(value.replace(DELETE, "\\x7f"))
        except UnicodeEncodeError as error:  # half a pair of surrogates
            raise BadRequest(f"{param} is no text: {error.reason}", param=param) from error
        return {"lark_grammar": f"start: /{pattern}/"}
    return {"lark_grammar": value}


def is_gbnf(constraint: Constraint) -> bool:
    """Whether a constraint is a grammar in llama.cpp's notation, which `answer_grammar` does not take."""
    return constraint.kind == "grammar" and isinstance(constraint.value, str) and "::=" in constraint.value


def arguments_of(tool: CalledTool) -> Constraint:
    """Return what the arguments of a tool's calls must be: any object if it has no schema, or, unless it is strict, one
    that is no object."""
    is_any = tool.schema is None or not (tool.is_strict or isinstance(tool.schema, dict))
    return Constraint("json", ANY_OBJECT if is_any else tool.schema, tool.param)


@dataclass(frozen=True, slots=True)
class ReplyGrammar:
    """Writes the grammars of one model's replies. `ends`: ids of tokens that end a reply."""

    form: ReplyFormat
    pieces: Pieces
    ends: Collection[int]

    def around(
        self,
        answer: dict[str, object] | None,
        *,
        opening: str,
        calls: Calls | None,
        arguments: Sequence[dict[str, object]],
    ) -> str:
        """Return the serialized grammar of a reply whose text is `answer` (None: any).

        `opening`: what the prompt has begun of the reply. `calls` may come in the text's place, with `arguments` for
        each of their tools; with none, they are free.
        """
        written = self._written(calls, arguments)
        rules = self._rules(opening, answer=answer is not None, calls=calls, written=written)
        if rules is None:
            return json.dumps({"grammars": [answer]})
        grammars: list[dict[str, object]] = [{"lark_grammar": "\n".join(rules)}]
        grammars += [{"name": "answer", **answer}] if answer is not None and not (calls and calls.is_forced) else []
        for each in written.arguments if written is not None else ():
            grammars += [{"name": name, **grammar} for name, grammar in each.grammars.items()]
        return json.dumps({"grammars": grammars})

    def _rules(self, opening: str, *, answer: bool, calls: Calls | None, written: CallRules | None) -> list[str] | None:
        """Return the rules around `@answer`; None if that is the whole reply. `written`: calls that are not free."""
        if written is not None and written.calls.is_forced:
            return written.forced(self.form.opening(written.calls.name) or "")
        if isinstance(self.form.tools, ChannelForm):
            return self._in_channels(self.form.tools, answer=answer, calls=calls is not None, written=written)
        thinking = self.form.leading_reasoning
        thought = "" if thinking is None else self._thought(thinking, opening)
        closed = self._closed(thinking) if thinking is not None and thought else []
        gap = BLANKS if thought else ""
        if not answer:
            assert written is not None, "a reply of any text and any calls needs no grammar"
            return [*written.free(f"{thought} {gap}"), *closed]
        call = written.alone() if written is not None else self._call(calls) if calls is not None else []
        if not thought and not call:
            return None
        rules = [f"start: {thought} reply", f"reply: {gap} @answer" + (f" | {gap} call" if call else "")]
        return [*rules, *closed, *call]

    def unenforced(self, tool: CalledTool) -> tuple[str, str] | None:
        """Return the place in a tool's schema of something that this format cannot enforce, and what that is."""
        tags = self._layout.tags if self._layout is not None else None
        return unenforced(tool.schema, tags) if tags is not None else None

    def can_write(self, calls: Calls | None) -> bool:
        """Whether calls are more than free: there are tools, and the format's layout is known."""
        return calls is not None and bool(calls.tools) and self._layout is not None

    @property
    def _layout(self) -> CallLayout | None:
        return self.form.tools.layout if self.form.tools is not None else None

    def _written(self, calls: Calls | None, arguments: Sequence[dict[str, object]]) -> CallRules | None:
        """Return the rules of calls that are not free; None if there are none."""
        layout = self._layout
        if calls is None or not calls.tools or layout is None or self.form.tools is None:
            return None
        tags, in_json = layout.tags, exact_arguments if layout.exact else json_arguments
        rules = [
            in_json(index, grammar) if tags is None else tagged_arguments(index, grammar, tags, self.pieces, self.ends)
            for index, grammar in enumerate(arguments)
        ]
        return CallRules(calls, rules, layout, self.form.tools.marks, self.pieces, self.ends)

    def _thought(self, thinking: ThinkingFormat, opening: str) -> str:
        """Return reasoning that the prompt has opened, or that the reply may begin with; nothing if it is over."""
        if thinking.close in opening:
            return ""
        if thinking.open in opening:
            return "thought"
        return f"({terms(thinking.open, self.pieces)} thought)?" if not opening.strip() else ""

    def _closed(self, thinking: ThinkingFormat) -> list[str]:
        """Return the rule of reasoning up to its end."""
        if any(isinstance(piece, int) for piece in self.pieces(thinking.close)):
            return [f"thought: {TEXT} {terms(thinking.close, self.pieces)}"]
        return [f"thought[suffix={literal(thinking.close)}]: {TEXT}"]

    def _call(self, calls: Calls) -> list[str]:
        """Return the rules of calls with any arguments. Where only their marks are known, they are free after the first
        one, up to the one that closes them if that is a token; none if calls cannot be distinguished."""
        loose = loose_calls(self.form.tools, calls, self.pieces)
        if loose:
            return loose
        marks = self.form.tools.marks if self.form.tools is not None else None
        if marks is None or not marks.open:
            return []
        opened, (token, closed) = terms(marks.open, self.pieces), first_token(marks.close, self.pieces)
        if token is None or closed != marks.close:
            return [f"call: {opened} {any_but((), self.ends)}"]
        inside = any_but((token,), self.ends)
        return [
            "call: one+",
            f"one: {opened} {inside.removesuffix('*')} {inside} {terms(closed, self.pieces)} {BLANKS}",
        ]

    def _in_channels(self, form: ChannelForm, *, answer: bool, calls: bool, written: CallRules | None) -> list[str]:
        channel, message, end, start = (
            terms(mark, self.pieces) for mark in (form.channel, form.message, form.ends[0], form.start)
        )
        constrain = f'({terms(form.constrain, self.pieces)} "json")? ' if form.constrain and answer else ""
        text = "@answer" if answer else TEXT
        aside = literal(ANALYSIS) if answer else f'("{ANALYSIS}" | "{ASIDE}")'
        turn = f'{message} {TEXT} {end} {start} "{ROLE}"'
        rules = [
            f"start: thought* (answer_message{' | call' if calls else ''})",
            f"thought: {channel} {aside} {turn}",
            f'answer_message: {channel} "{ANSWER}" / ?/ {constrain}{message} {text}',
        ]
        if written is not None:
            return [*rules, *written.alone()]
        return [*rules, f'call: {channel} "{ASIDE}" {any_but((), self.ends)}'] if calls else rules
