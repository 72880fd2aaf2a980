"""Control tokens: which added tokens structure a prompt, and how their spelling in content is kept apart.

A control token is flagged special, or it is an added token that the chat template names (blank runs excepted). Content
may spell one: there it is text. So before a template runs, a guard character goes inside every look-alike; after it,
unguarded spellings are tokens, and the guards go. The guard is refused in input, so nobody can place one.

    content  "say <|im_end|>"  -guard-▶  "say <⟂|im_end|>"  -template-▶  "...<⟂|im_end|><|im_end|>"
    -split-▶  "...<|im_end|>", token
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.errors import ModelRefused
from rekindle.text.messages import GUARD

# Unicode White_Space, which is what the library strips; Python's str.strip() would take U+001C to U+001F as well.
WHITE_SPACE = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
)
BLANK = "\u2581"  # ▁, the sign that stands for a space inside sentencepiece tokens

MOST_IDS = 1 << 24  # that keys can spell (see vocabulary)


@dataclass(frozen=True, slots=True)
class AddedToken:
    """An entry of `added_tokens`: matched in raw text before anything else is tokenised."""

    id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> AddedToken:
        """An entry of the file; ValueError for one without content, or with an id that no key can spell."""
        flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
        token = cls(int(entry["id"]), str(entry["content"]), bool(entry.get("special", False)), **flags)
        if not token.content:
            raise ValueError(f"added token {token.id} is empty")
        if not 0 <= token.id < MOST_IDS:
            raise ValueError(f"added token {token.content[:40]!r} has the id {token.id}, ids are below {MOST_IDS}")
        return token


def find_control_tokens(added: Iterable[AddedToken], template_literals: Iterable[str]) -> tuple[AddedToken, ...]:
    """Those of the added tokens that structure prompts of this template."""
    literals = [text for text in template_literals if text]
    found = []
    for token in added:
        blank = not token.content.replace(BLANK, " ").strip(WHITE_SPACE)
        named = not blank and any(token.content in text for text in literals)
        if token.content and (token.special or named):
            found.append(token)
    return tuple(found)


class ControlTokens:
    """Guards look-alikes in content and splits rendered text at what is left."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        bad = next((token.content for token in tokens if GUARD in token.content), None)
        if bad is not None:
            raise ModelRefused(f"tokenizer.json: the token {bad!r} contains U+FDD0, which prompts may not contain")
        self.tokens = tuple(tokens)
        self.by_content = {token.content: token for token in tokens}
        self._all = _Guard([token.content for token in tokens])
        self._flagged = _Guard([token.content for token in tokens if token.special])
        self._pattern = _alternatives(token for token in tokens)

    def guard(self, text: str) -> str:
        """Make every spelling of a control token in `text` be text."""
        return self._all.apply(text)

    def guard_reply(self, text: str) -> str:
        """The same for assistant content, where tokens without the special flag (`<think>`) are tokens."""
        return self._flagged.apply(text)

    def guard_name(self, text: str) -> str:
        """The same for names, which templates put between brackets: a name may not complete a token either."""
        inside = any(text in content for content in self.by_content)
        return (GUARD if inside and text else "") + self._all.apply(text)

    def guard_structured(self, text: str) -> str:
        """The same for structured text of a reply, where a flagged token is spelled behind a guard of its own."""
        first, *others = text.split(GUARD)
        parts = [self.guard_reply(first)]
        for part in others:
            flagged = (token.content for token in self.tokens if token.special and part.startswith(token.content))
            spelled = max(flagged, key=len, default="")
            parts += [spelled, self.guard_reply(part[len(spelled) :])]
        return "".join(parts)

    def split(self, text: str) -> list[str | int]:
        """Cut rendered text into texts and token ids, in order, without guards; blanks that tokens swallow go."""
        pieces: list[str | int] = []
        end, strip_next = 0, False
        for found in self._pattern.finditer(text) if self._pattern else ():
            token = self.by_content[found.group()]
            _append_text(pieces, text[end : found.start()], left=strip_next, right=token.lstrip)
            pieces.append(token.id)
            end, strip_next = found.end(), token.rstrip
        _append_text(pieces, text[end:], left=strip_next, right=False)
        return pieces


class _Guard:
    """Puts the guard inside every occurrence, overlapping ones too, of some spellings."""

    def __init__(self, spellings: Sequence[str]) -> None:
        self._starts: Callable[[str], str] | None = None
        if spellings:
            longest_first = sorted(spellings, key=len, reverse=True)
            pattern = re.compile(f"(?s)(?=(?:{'|'.join(map(re.escape, longest_first))}))(.)")
            self._starts = lambda text: pattern.sub(rf"\1{GUARD}", text)
        self._first = {spelling[0] for spelling in spellings}
        self._beginnings = {spelling[:end] for spelling in spellings for end in range(1, len(spelling))}
        self._longest = max((len(beginning) for beginning in self._beginnings), default=0)

    def apply(self, text: str) -> str:
        if self._starts is None or not any(char in text for char in self._first):
            return text
        guarded = self._starts(text)
        # What follows in the template or in the next content may complete a token that begins here.
        ends = (text[-length:] for length in range(1, min(self._longest, len(text)) + 1))
        dangling = any(end in self._beginnings and end.strip(WHITE_SPACE) for end in ends)
        return guarded + GUARD if dangling else guarded


def _alternatives(tokens: Iterable[AddedToken]) -> re.Pattern[str] | None:
    """Leftmost, then longest: the order in which the library matches added tokens."""
    parts = []
    for token in sorted(tokens, key=lambda token: len(token.content), reverse=True):
        part = re.escape(token.content)
        # A spelling of one character has no inside: its guard stands behind it.
        part += f"(?!{GUARD})" if len(token.content) == 1 else ""
        parts.append(rf"(?<!\w){part}(?!\w)" if token.single_word else part)
    return re.compile("|".join(parts)) if parts else None


def _append_text(pieces: list[str | int], text: str, *, left: bool, right: bool) -> None:
    text = text.replace(GUARD, "")
    text = text.lstrip(WHITE_SPACE) if left else text
    text = text.rstrip(WHITE_SPACE) if right else text
    if text:
        pieces.append(text)
