"""Grammars of whole replies: reasoning as the model writes it, then what the constraint says, or a tool call.

Owns how the format of a model's replies (`replies`) is written in the notation of llguidance. Marks that are tokens are
tokens there, by their ids, so no text of a reply is taken for one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rekindle.errors import BadRequest
from rekindle.text.constraints.schema import OPTIONS, enforced
from rekindle.text.constraints.types import Constraint
from rekindle.text.replies import ReplyFormat, ThinkingFormat
from rekindle.text.replies.channels import ANALYSIS, ANSWER, ASIDE, ROLE, ChannelForm

_BLANKS = "/[ \\t\\r\\n]{0,8}/"  # after the end of reasoning
_TEXT = "/(?s:.)*/"
MOST_CHARS = 1 << 20  # of a schema or grammar
Pieces = Callable[[str], Sequence[str | int]]  # structured text -> texts and ids of control tokens


def answer_grammar(constraint: Constraint, *, coerce_one_of: bool = False) -> dict[str, object]:
    """Return the grammar of the constrained text alone; BadRequest if it is malformed.

    `coerce_one_of`: schemas in `oneOf` need not exclude each other.
    """
    kind, value, param = constraint.kind, constraint.value, constraint.param
    if kind == "json":
        if not isinstance(value, dict | bool):
            raise BadRequest(f"{param}: a schema is an object", param=param)
        schema = {"not": {}} if value is False else {} if value is True else enforced(value)
        return {"json_schema": {**schema, "x-guidance": {**OPTIONS, "coerce_one_of": coerce_one_of}}}
    if kind == "choice":
        if not value or not all(isinstance(each, str) and each for each in value):
            raise BadRequest(f"{param}: give at least one text, none of them empty", param=param)
        return {"lark_grammar": f"start: {' | '.join(map(_literal, value))}"}
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{param} must be a text that is not empty", param=param)
    from llguidance import gbnf_to_lark, regex_to_lark  # takes a tenth of a second, and few replies are constrained

    if kind == "regex":
        return {"lark_grammar": f"start: /{regex_to_lark(value)}/"}
    try:
        return {"lark_grammar": gbnf_to_lark.gbnf_to_lark(value) if "::=" in value else value}
    except gbnf_to_lark.GbnfToLarkError as error:
        raise BadRequest(f"{param}: {error}", param=param) from None


@dataclass(frozen=True, slots=True)
class ReplyGrammar:
    """Writes the grammars of one model's replies. `ends`: ids of tokens that end a reply."""

    form: ReplyFormat
    pieces: Pieces
    ends: Collection[int]

    def around(self, answer: dict[str, object], *, opening: str, calls: bool) -> str:
        """Return the serialized grammar of a reply whose text is `answer`.

        `opening`: what the prompt has begun of the reply; `calls`: the reply may be a tool call instead.
        """
        rules = self._rules(opening, calls=calls)
        if rules is None:
            return json.dumps({"grammars": [answer]})
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, {"name": "answer", **answer}]})

    def _rules(self, opening: str, *, calls: bool) -> list[str] | None:
        """Return the rules around `@answer`; None if it is the whole reply."""
        if isinstance(self.form.tools, ChannelForm):
            return self._in_channels(self.form.tools, calls=calls)
        thinking = self.form.leading_reasoning
        thought = "" if thinking is None else self._thought(thinking, opening)
        call = self._call() if calls else ""
        if not thought and not call:
            return None
        gap = _BLANKS if thought else ""
        rules = [f"start: {thought} reply", f"reply: {gap} @answer" + (f" | {gap} call" if call else "")]
        rules += self._closed(thinking) if thinking is not None and thought else []
        return [*rules, f"call: {call}"] if call else rules

    def _thought(self, thinking: ThinkingFormat, opening: str) -> str:
        """Return reasoning that the prompt has opened, or that the reply may begin with; nothing if it is over."""
        if thinking.close in opening:
            return ""
        if thinking.open in opening:
            return "thought"
        return f"({self._terms(thinking.open)} thought)?" if not opening.strip() else ""

    def _closed(self, thinking: ThinkingFormat) -> list[str]:
        """Return the rule of reasoning up to its end."""
        pieces = self.pieces(thinking.close)
        if any(isinstance(piece, int) for piece in pieces):
            return [f"thought: {_TEXT} {self._terms(thinking.close)}"]
        return [f"thought[suffix={_literal(thinking.close)}]: {_TEXT}"]

    def _call(self) -> str:
        """Return the rule of a call, which is free after its mark; nothing if calls cannot be distinguished."""
        marks = self.form.tools.marks if self.form.tools is not None else None
        return f"{self._terms(marks.open)} {self._anything()}" if marks is not None and marks.open else ""

    def _in_channels(self, form: ChannelForm, *, calls: bool) -> list[str]:
        channel, message = self._terms(form.channel), self._terms(form.message)
        end, start = self._terms(form.ends[0]), self._terms(form.start)
        constrain = f'({self._terms(form.constrain)} "json")? ' if form.constrain else ""
        rules = [
            "start: thought* (answer_message" + (" | call)" if calls else ")"),
            f'thought: {channel} "{ANALYSIS}" {message} {_TEXT} {end} {start} "{ROLE}"',
            f'answer_message: {channel} "{ANSWER}" / ?/ {constrain}{message} @answer',
        ]
        return [*rules, f'call: {channel} "{ASIDE}" {self._anything()}'] if calls else rules

    def _anything(self) -> str:
        """Return a term for any tokens but those that end a reply."""
        return f"<[^{','.join(map(str, sorted(self.ends)))}]>*" if self.ends else "<[*]>*"

    def _terms(self, text: str) -> str:
        """Return structured text as terms of a rule."""
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else _literal(piece) for piece in self.pieces(text))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
