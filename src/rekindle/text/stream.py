"""Tokens of a reply as text that is safe to send.

Owns the bytes of a character that is not complete yet and the text that may still become a stop string. Tokens flagged
special have no text, but those that a reader requested (`visible`) are written after a guard; other control tokens
(`<think>`) are written out, so that the text encodes to the same tokens again.
After a stop string (`stop_text`) nothing follows; it is not part of the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set

import numpy as np

from rekindle.text.messages import GUARD
from rekindle.text.prompt import PromptEncoder


class StopSearch:
    """Ends a text that comes in pieces at the first of some strings; holds back what may become one.

    `found` is the string that ended it: no text follows.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.found: str | None = None
        self.stop: tuple[str, ...] = ()
        self._held = ""
        self.watch_for(stop)

    def watch_for(self, stop: Sequence[str]) -> None:
        """Search these strings from here on; text that was released already is not searched again."""
        self.stop = tuple(text for text in stop if text)

    def push(self, text: str) -> str:
        """Add a piece; return the text that is now certain."""
        if not self.stop:
            return text
        text = self._held + text
        found = min(((at, stop) for stop in self.stop if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            at, self.found = found
            self._held = ""
            return text[:at]
        keep = max((overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back: what follows continues no stop string."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Incremental text of one reply.

    `after` is the last token of the prompt. The space that some tokenizers put before a text is dropped here: at the
    start of the reply, unless the prompt ends in text, and after control tokens if the tokenizer adds one there.

    `visible` are ids of tokens flagged special that are part of the text: as U+FDD0 and their content, always in one
    piece. Stop strings do not span them.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        stop: Sequence[str] = (),
        *,
        after: int | None = None,
        visible: Set[int] = frozenset(),
    ) -> None:
        self._vocabulary = encoder.vocabulary
        self._prefix = encoder.prefix
        self._visible = visible
        self._search = StopSearch(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        at_start = after is None or self._vocabulary.is_control_token(after)
        self._drop_blank = self._prefix != "none" and at_start

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self._search.found is not None

    @property
    def stop_text(self) -> str | None:
        """The stop string that came."""
        return self._search.found

    @property
    def ends_anywhere(self) -> tuple[str, ...]:
        """The strings that end the reply wherever they are."""
        return self._search.stop

    def watch_for(self, stop: Sequence[str]) -> None:
        """Stop at these strings from here on; text that was released already is not searched again."""
        self._search.watch_for(stop)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, also of one flagged special; they may be a part of a character."""
        return self._vocabulary.token_bytes(token_id)

    def push(self, token_id: int) -> str:
        """Add one token; return the text that is now certain, often none."""
        if self.stopped:
            return ""
        shown = self._vocabulary.shown(token_id)
        if self._vocabulary.is_control_token(token_id):
            text = self._decoder.decode(b"", final=True) + shown.decode("utf-8", "replace")
            self._decoder.reset()
            self._drop_blank = self._prefix in ("each", "prepend")
            if token_id in self._visible:
                return self._marked(text, token_id)
        else:
            if shown and self._drop_blank:
                shown = shown.removeprefix(b" ")
                self._drop_blank = False
            text = self._decoder.decode(shown)
        return self._release(text)

    def finish(self) -> str:
        """Return the remaining text; an unfinished character becomes U+FFFD. Empty after a stop string."""
        if self.stopped:
            return ""
        return self._release(self._decoder.decode(b"", final=True)) + self._search.flush()

    def _marked(self, text: str, token_id: int) -> str:
        """Return the text before a visible token, and the token."""
        before = self._release(text) + self._search.flush()
        return before if self.stopped else before + GUARD + self.token_bytes(token_id).decode("utf-8", "replace")

    def _release(self, text: str) -> str:
        # A reply is sent back as history, where the guard is refused.
        return self._search.push(text.replace(GUARD, "\ufffd"))


def structured(encoder: PromptEncoder, ids: Sequence[int] | np.ndarray) -> str:
    """The structured text of ids (see text/replies), with every token flagged special visible."""
    stream = TextStream(encoder, visible=encoder.vocabulary.special_ids)
    return "".join([*(stream.push(int(token_id)) for token_id in ids), stream.finish()])


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`, but not all of it."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
