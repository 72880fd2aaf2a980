"""Calls for models whose templates have none, or have them in a form that is not known: an envelope of our own.

Owns the marks of that form. Everything else of it is the same as of any envelope: a reader, a grammar and forced calls.
The form is exact: a grammar leaves blanks no choice, and a reply ends with its call, so that the history in which a
call comes back is the text that was computed. One call a reply: models that were not trained on the form add calls that
nobody needs. A history may have several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rekindle.errors import BadRequest
from rekindle.text.messages import Message, ToolCall
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies.envelope import EnvelopeForm
from rekindle.text.replies.format import ReplyFormat
from rekindle.text.replies.probes import find_reply_format
from rekindle.text.replies.reader import CallMarks
from rekindle.text.tools_text import ToolsInText

# The first pair that the tokenizer has no tokens for: a token flagged special is no text, and others are written in
# the history of the model but not in the description of tools.
_MARKS = (("<tool_call>", "</tool_call>"), ("<function_call>", "</function_call>"), ("<call>", "</call>"))
_WORD = "quicksilver"


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
