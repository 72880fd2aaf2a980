"""The format of a model's replies, found by rendering probes through its template.

Owns a few sample conversations and the rendering of their last message. The marks around reasoning are read here, those
around a call by the form that recognises it. Nothing here knows a model's name. A probe that the template refuses gives
no information.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rekindle.errors import BadRequest
from rekindle.text.messages import GUARD, Message, ToolCall
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies.channels import ANALYSIS, ChannelForm, recognise_channels
from rekindle.text.replies.envelope import HERMES, EnvelopeForm, recognise_envelope
from rekindle.text.replies.format import ReplyFormat, ThinkingFormat, ToolFormat
from rekindle.text.replies.keyed import recognise_keyed
from rekindle.text.replies.named import recognise_name_keys, recognise_named
from rekindle.text.replies.pythonic import PythonicForm, recognise_pythonic
from rekindle.text.replies.reader import CallMarks
from rekindle.text.replies.sample import ARGUMENTS, MARK, QUESTION, REASONING, REPLY, SHORT_ID, TOOL, VALUES, CallSample
from rekindle.text.replies.tagged import recognise_tagged
from rekindle.text.stream import structured
from rekindle.text.tools_text import ToolsInText
from rekindle.text.vocabulary import AddedToken

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Probes.",
            "parameters": {
                "type": "object",
                "properties": {"probe_number": {"type": "integer"}, "probe_word": {"type": "string"}},
                "required": [],
            },
        },
    }
]
_LONG_ID = "call_0123456789abcdef"
# Pairs that models open by themselves, though their template renders no reasoning: (open, close, lead, trail, gap).
_KNOWN_MARKS = (
    ("<think>", "</think>", "\n", "\n", "\n\n"),
    ("[THINK]", "[/THINK]", "", "", ""),
    ("<|channel>thought", "<channel|>", "\n", "", ""),
    ("<|inner_prefix|>", "<|inner_suffix|>", "", "", ""),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "\n", "\n", "\n"),
)
# Forms of calls whose templates render none of a conversation, by what must be in the vocabulary, or in a prompt with
# tools: (sign, form).
_KNOWN_CALLS: tuple[tuple[str, ToolFormat], ...] = (
    ("<|tool_call_start|>", PythonicForm(CallMarks("<|tool_call_start|>", "<|tool_call_end|>", listed=True, item=""))),
    ("<|tool_call|>", EnvelopeForm(CallMarks("<|tool_call|>", listed=True), blank="")),
    ("<tool_call>", EnvelopeForm(HERMES)),
)
_VARIANTS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": True})
_RECOGNISERS = (
    recognise_channels,
    recognise_envelope,
    recognise_keyed,
    recognise_tagged,
    recognise_name_keys,
    recognise_named,
    recognise_pythonic,
)
# The first pair that the tokenizer has no tokens for: a token flagged special is no text, and others are written in
# the history of the model but not in the description of tools.
_MARKS = (("<tool_call>", "</tool_call>"), ("<function_call>", "</function_call>"), ("<call>", "</call>"))
_WORD = "quicksilver"


def find_reply_format(encoder: PromptEncoder) -> ReplyFormat:
    """Find the format of this model's replies; a dozen renderings. Never raises: an odd template has no form."""
    prober = _Prober(encoder)
    calls = prober.tools()
    tools = calls.form
    thinking = _reasoning_channel(tools) if isinstance(tools, ChannelForm) else prober.thinking()
    text = "\n".join([*_strings_of(thinking), *_strings_of(tools)])
    shown = [token for token in encoder.controls.tokens if token.special and GUARD + token.content in text]
    return ReplyFormat(
        thinking,
        tools,
        visible=frozenset(token.id for token in shown),
        specials=tuple(GUARD + token.content for token in shown),
        call_ids="short" if calls.has_short_ids else "long",
        one_call=calls.takes_one,
    )


def find_reply_ends(encoder: PromptEncoder) -> frozenset[int]:
    """The ids that end a reply by what tokenizer and template say: the tokenizer's end of sequence, and what the
    template writes after a reply, and after one with a call. A few renderings; never raises, as above."""
    contents = {encoder.template.special_tokens.get("eos_token"), *_Prober(encoder).ends()}
    known = encoder.controls.by_content
    return frozenset(known[content].id for content in contents if content in known)


@dataclass(frozen=True, slots=True)
class CallProbe:
    """How calls are written, and which the template accepts: only ids of nine signs, only one per message."""

    form: ToolFormat | None
    has_short_ids: bool = False
    takes_one: bool = False


class _Prober:
    """Renders probes for one encoder; the result is None if the template refuses one."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder

    def thinking(self) -> ThinkingFormat | None:
        """The marks around reasoning, if the template renders it; else a known pair."""
        call = ToolCall(SHORT_ID, TOOL, ARGUMENTS)
        for variables in _VARIANTS:
            plain = self._turn([Message("user", QUESTION), Message("assistant", REPLY)], **variables) or ""
            for calls in ((), (call,)):
                for text in (REPLY, ""):
                    messages = [
                        Message("user", QUESTION),
                        Message("assistant", text, tool_calls=calls, reasoning=REASONING),
                    ]
                    turn = self._turn(messages, tools=_TOOLS if calls else None, **variables)
                    found = _around_reasoning(turn or "", plain)
                    if found is not None:
                        return found
        return next((found for pair in _KNOWN_MARKS if (found := self._known(pair))), None)

    def tools(self) -> CallProbe:
        """The marks around calls, and which calls the template accepts."""
        plain = self._rendered([Message("user", QUESTION), Message("assistant", REPLY)]) or ""
        for call_id in (_LONG_ID, SHORT_ID):
            call = ToolCall(call_id, TOOL, ARGUMENTS)
            for text in (REPLY, ""):
                body = self._body(Message("assistant", text, tool_calls=(call,)))
                found = _recognised(CallSample(body or "", plain, self._specials(), call_id))
                if found is not None:
                    two = self._body(Message("assistant", text, tool_calls=(call, call))) or ""
                    num_calls = max(two.count(TOOL), two.count(call_id))
                    return CallProbe(found, has_short_ids=call_id == SHORT_ID, takes_one=num_calls < 2)
        return CallProbe(self._known_calls())

    def ends(self) -> set[str]:
        """The control tokens that end a reply, and one with calls: the last that is written after it, unless it is also
        written inside of a reply, opens the next turn, or is a mark of calls. Where a template knows of reasoning and
        shows none, what ends a question may end that, too; in channels it ends every message."""
        question = Message("user", QUESTION)
        whole = self._rendered([question, Message("assistant", REPLY)]) or ""
        thought = self._rendered([question, Message("assistant", REPLY, reasoning=REASONING)]) or ""
        asked = self._tokens((self._rendered([question]) or "").rpartition(QUESTION)[2])
        one, two = (self._after_calls(num) for num in (1, 2))
        inside = self._tokens(two.partition(TOOL)[0] if TOOL in two else "")
        if REASONING in thought:
            inside += self._tokens(thought.rpartition(REASONING)[2].partition(REPLY)[0])
        elif self.thinking() is None and any("think" in text.lower() for text in self._encoder.template.literals()):
            inside += asked[:1]
        form = self.tools().form
        in_channels = isinstance(form, ChannelForm)
        inside += asked[:1] if in_channels else []
        marks = "" if in_channels else "".join(_strings_of(form))
        found = set()
        for text in (whole.rpartition(REPLY)[2] if REPLY in whole else "", one):
            last = next((token for token in reversed(self._tokens(text)) if token not in asked[1:]), "")
            found |= {last} if last not in inside and last not in marks else set()
        return found

    def _after_calls(self, num: int) -> str:
        """What follows the arguments of the first of so many calls, to the end; empty if calls are not rendered."""
        call = ToolCall(SHORT_ID, TOOL, ARGUMENTS)
        messages = [Message("user", QUESTION), Message("assistant", "", tool_calls=(call,) * num)]
        text = (self._rendered(messages, _TOOLS) or "").rpartition(QUESTION)[2]
        return text.partition(VALUES["probe_word"])[2]

    def _tokens(self, text: str) -> list[str]:
        """The control tokens of a structured text, in order."""
        contents = sorted(self._encoder.controls.by_content, key=len, reverse=True)
        return re.findall("|".join(map(re.escape, contents)), text) if contents else []

    def _known_calls(self) -> ToolFormat | None:
        """A form that the vocabulary, or the template's text about tools, has the opening mark of."""
        contents = {token.content: token for token in self._encoder.controls.tokens}
        prompt = self._rendered([Message("user", QUESTION)], _TOOLS, cue=True) or ""
        if TOOL not in prompt:  # it takes no tools
            return None
        for sign, form in _KNOWN_CALLS:
            if sign in contents or sign in prompt:
                special = {mark for mark in (form.marks.open, form.marks.close) if _is_special(contents.get(mark))}
                return _guarded(form, special)
        return None

    def _known(self, pair: tuple[str, str, str, str, str]) -> ThinkingFormat | None:
        """A pair that the cue opens, that the template removes from earlier replies, or whose marks are tokens."""
        tokens = self._encoder.controls.tokens
        flagged = [token.content for token in tokens if token.special]
        open_, close = (GUARD + mark if mark.startswith(tuple(flagged)) else mark for mark in pair[:2])
        form = ThinkingFormat(open_, close, *pair[2:])
        cue = self._rendered([Message("user", QUESTION)], cue=True) or ""
        are_tokens = all(mark.startswith(tuple(token.content for token in tokens)) for mark in pair[:2])
        if form.opened_at_end_of(cue) or are_tokens:
            return form
        inside = f"{pair[0]}\n{REASONING}\n{pair[1]}\n\n{REPLY}"
        later = [Message("user", QUESTION), Message("assistant", inside), Message("user", QUESTION)]
        text = self._rendered(later, cue=True) or ""
        return form if REPLY in text and REASONING not in text else None

    def _turn(self, messages: Sequence[Message], tools: Any = None, **variables: Any) -> str | None:
        """What is rendered after the question."""
        text = self._rendered(messages, tools, **variables)
        return text.rpartition(QUESTION)[2] if text else None

    def _body(self, message: Message) -> str | None:
        """What is rendered of a reply, after the cue."""
        question = [Message("user", QUESTION)]
        tools = _TOOLS if message.tool_calls else None
        prompt = self._rendered(question, tools, cue=True)
        whole = self._rendered([*question, message], tools)
        if prompt is None or whole is None:
            return None
        same = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        inside = (found.start() for found in re.finditer(MARK, whole) if found.start() < same < found.end())
        return whole[next(inside, same) :]

    def _rendered(
        self, messages: Sequence[Message], tools: Any = None, *, cue: bool = False, **variables: Any
    ) -> str | None:
        try:
            prompt = self._encoder.render_chat(messages, tools, add_generation_prompt=cue, **variables)
        except BadRequest:
            return None
        return structured(self._encoder, self._encoder.encode(prompt))

    def _specials(self) -> frozenset[str]:
        return frozenset(GUARD + token.content for token in self._encoder.controls.tokens if token.special)


def _around_reasoning(turn: str, plain: str) -> ThinkingFormat | None:
    """The marks next to the reasoning; one in a turn without reasoning opens none, unless it opens an empty one."""
    found = re.search(rf"({MARK}\w*)(\s*){re.escape(REASONING)}(\s*)({MARK})(\s*)", turn)
    if found is None:
        return None
    form = ThinkingFormat(found[1], found[4], found[2], found[3], found[5])
    empty = re.search(rf"{re.escape(form.open)}\s*{re.escape(form.close)}", plain)
    return form if form.open != form.close and (form.open not in plain or empty) else None


def _is_special(token: AddedToken | None) -> bool:
    return token is not None and token.special


def _guarded(form: Any, special: set[str]) -> ToolFormat:
    """The form with a guard before the marks that are tokens flagged special."""
    open_, close = (GUARD + mark if mark in special else mark for mark in (form.marks.open, form.marks.close))
    guarded: ToolFormat = replace(form, marks=replace(form.marks, open=open_, close=close))
    return guarded


def _recognised(sample: CallSample) -> ToolFormat | None:
    return next((form for recognise in _RECOGNISERS if (form := recognise(sample))), None)


def _reasoning_channel(form: ChannelForm) -> ThinkingFormat:
    return ThinkingFormat(form.header(ANALYSIS), form.ends[0])


def _strings_of(form: object) -> list[str]:
    """Every string in a form and its parts."""
    if isinstance(form, str):
        return [form]
    parts = form if isinstance(form, tuple) else [getattr(form, name) for name in getattr(form, "__slots__", ())]
    return [text for part in parts for text in _strings_of(part)]


# Calls for models whose templates have none, or have them in a form that is not known: an envelope of our own.
#
# Owns the marks of that form. Everything else of it is the same as of any envelope: a reader, a grammar and forced
# calls. The form is exact: a grammar leaves blanks no choice, and a reply ends with its call, so that the history in
# which a call comes back is the text that was computed. One call a reply: models that were not trained on the form add
# calls that nobody needs. A history may have several.


def fit(encoder: PromptEncoder) -> tuple[PromptEncoder, ReplyFormat]:
    """Return the format of a model's replies, and an encoder that writes histories in it.

    With a template whose calls are known, the encoder is the same. Without a template there are no calls.
    """
    found = find_reply_format(encoder)
    if found.tools is not None or not encoder.template.sources:
        return encoder, found
    form = _generic(encoder)
    takes_system = _shows_system(encoder)
    return encoder.with_tools_in_text(ToolsInText(lambda calls: written(form, calls), takes_system)), replace(
        found, tools=form, one_call=True
    )


def written(form: EnvelopeForm, calls: Sequence[ToolCall]) -> str:
    """Return calls as the model writes them."""
    layout = form.layout
    one = (f"{layout.head}{layout.escape(call.name)}{layout.middle} {call.arguments or '{}'}" for call in calls)
    return layout.begin + layout.joint.join(text + layout.tail for text in one) + layout.end


def _generic(encoder: PromptEncoder) -> EnvelopeForm:
    tokens = {token.content for token in encoder.controls.tokens}
    free = (marks for marks in _MARKS if not any(token in mark for mark in marks for token in tokens))
    return EnvelopeForm(CallMarks(*next(free, _MARKS[-1])), exact=True)


def _shows_system(encoder: PromptEncoder) -> bool:
    """Whether a system message is in the prompt, wherever; some templates leave it out without an error."""
    try:
        prompt = encoder.render_chat([Message("system", _WORD), Message("user", "Hello.")])
    except BadRequest:
        return True  # the template refuses all, and so will it later
    return _WORD in encoder.readable(prompt.key)
