"""Tokens of a reply as text that is safe to send.

Owns the bytes of a character that is not complete yet and the text that may still become a stop string. Tokens flagged
special have no text; other control tokens (`<think>`) are spelled out, so that the text comes back as the same tokens.
Once a stop string was found nothing follows; it is not part of the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from rekindle.text.messages import GUARD
from rekindle.text.prompt import PromptEncoder


class TextStream:
    """Incremental text of one reply.

    `after` is the last token of the prompt. Tokenizers that put a space before a text drop it here: at the start of the
    reply, unless the prompt ends in text, and after control tokens where the tokenizer adds one there.
    """

    def __init__(self, encoder: PromptEncoder, stop: Sequence[str] = (), *, after: int | None = None) -> None:
        self.stopped = False
        self._vocabulary = encoder.vocabulary
        self._prefix = encoder.prefix
        self._stop = tuple(text for text in stop if text)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        at_start = after is None or self._vocabulary.is_control_token(after)
        self._drop_blank = self._prefix != "none" and at_start

    def watch_for(self, stop: Sequence[str]) -> None:
        """Stop at these strings from here on; text that was released already is not looked at again."""
        self._stop = tuple(text for text in stop if text)

    def spelled(self, token_id: int) -> bytes:
        """The bytes of one token, also of one flagged special; they may be a part of a character."""
        return self._vocabulary.spelled(token_id)

    def push(self, token_id: int) -> str:
        """Take one token; return the text that became certain, often none."""
        if self.stopped:
            return ""
        shown = self._vocabulary.shown(token_id)
        if self._vocabulary.is_control_token(token_id):
            text = self._decoder.decode(b"", final=True) + shown.decode("utf-8", "replace")
            self._decoder.reset()
            self._drop_blank = self._prefix in ("each", "prepend")
        else:
            if shown and self._drop_blank:
                shown = shown.removeprefix(b" ")
                self._drop_blank = False
            text = self._decoder.decode(shown)
        return self._release(text)

    def finish(self) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD. Empty after a stop string."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        # A reply is sent back as history, where the guard is refused.
        text = self._held + text.replace(GUARD, "\ufffd")
        found = min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped, self._held = True, ""
            return text[:found]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
