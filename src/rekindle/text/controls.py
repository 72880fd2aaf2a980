"""Control tokens: which added tokens structure a prompt, and how look-alikes in content are kept apart.

A control token is flagged special, or it is an added token that the chat template names (blank runs excepted). Content
may hold the same characters: there they are text. So before a template runs, a guard character is inserted into every
look-alike; after it, unguarded occurrences are tokens, and the guards are removed. The guard is refused in input, so no
client can insert one.

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
BLANK = "\u2581"  # ▁, the sign for a space inside sentencepiece tokens

MOST_NESTED = 20  # groups in a pattern; `re` itself follows a few hundred
MOST_IDS = 1 << 24  # the number of ids that keys can encode (see vocabulary)


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
        """Read an entry of the file; ValueError if it has no content, or an id that no key can encode."""
        flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
        token = cls(int(entry["id"]), str(entry["content"]), bool(entry.get("special", False)), **flags)
        if not token.content:
            raise ValueError(f"added token {token.id} is empty")
        if not 0 <= token.id < MOST_IDS:
            raise ValueError(f"added token {token.content[:40]!r} has the id {token.id}, ids are below {MOST_IDS}")
        return token


def find_control_tokens(added: Iterable[AddedToken], template_literals: Iterable[str]) -> tuple[AddedToken, ...]:
    """Return the added tokens that structure prompts of this template."""
    literals = [text for text in template_literals if text]
    found = []
    for token in added:
        blank = not token.content.replace(BLANK, " ").strip(WHITE_SPACE)
        named = not blank and any(token.content in text for text in literals)
        if token.content and (token.special or named):
            found.append(token)
    return tuple(found)


class ControlTokens:
    """Guards look-alikes in content and splits rendered text at the real tokens."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        bad = next((token.content for token in tokens if GUARD in token.content), None)
        if bad is not None:
            raise ModelRefused(f"tokenizer.json: the token {bad!r} contains U+FDD0, which prompts may not contain")
        self.tokens = tuple(tokens)
        self.by_content = {token.content: token for token in tokens}
        self._all = _Guard([token.content for token in tokens])
        self._flagged = _Guard([token.content for token in tokens if token.special])
        # Matches leftmost, then longest: as the library matches added tokens.
        self._pattern = re.compile(_longest_of({token.content: _after(token) for token in tokens})) if tokens else None

    def guard(self, text: str) -> str:
        """Guard every look-alike of a control token in `text`."""
        return self._all.apply(text)

    def guard_reply(self, text: str) -> str:
        """The same for assistant content, where tokens without the special flag (`<think>`) stay tokens."""
        return self._flagged.apply(text)

    def guard_name(self, text: str) -> str:
        """The same for names, which templates put between brackets: a name may not complete a token either."""
        inside = any(text in content for content in self.by_content)
        return (GUARD if inside and text else "") + self._all.apply(text)

    def guard_structured(self, text: str) -> str:
        """The same for structured text of a reply, where a flagged token follows a guard."""
        first, *others = text.split(GUARD)
        parts = [self.guard_reply(first)]
        for part in others:
            flagged = (token.content for token in self.tokens if token.special and part.startswith(token.content))
            content = max(flagged, key=len, default="")
            parts += [content, self.guard_reply(part[len(content) :])]
        return "".join(parts)

    def split(self, text: str) -> list[str | int]:
        """Split rendered text into texts and token ids, in order, without guards and blanks that tokens strip."""
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
    """Inserts the guard into every occurrence of some texts, overlapping ones too."""

    def __init__(self, contents: Sequence[str]) -> None:
        self._starts: Callable[[str], str] | None = None
        if contents:
            pattern = re.compile(f"(?s)(?={_longest_of(dict.fromkeys(contents, ''))})(.)")
            self._starts = lambda text: pattern.sub(rf"\1{GUARD}", text)
        self._first = {content[0] for content in contents}
        self._beginnings = {content[:end] for content in contents for end in range(1, len(content))}
        self._longest = max((len(beginning) for beginning in self._beginnings), default=0)

    def apply(self, text: str) -> str:
        if self._starts is None or not any(char in text for char in self._first):
            return text
        guarded = self._starts(text)
        # What follows in the template or in the next content may complete a token that begins here.
        ends = (text[-length:] for length in range(1, min(self._longest, len(text)) + 1))
        dangling = any(end in self._beginnings and end.strip(WHITE_SPACE) for end in ends)
        return guarded + GUARD if dangling else guarded


def _after(token: AddedToken) -> str:
    """What must hold where an occurrence of a token ends for it to be the token."""
    if token.single_word:
        return rf"(?<!\w{re.escape(token.content)})(?!\w)"
    # A token of one character has no inside: its guard follows it.
    return f"(?!{GUARD})" if len(token.content) == 1 else ""


def _longest_of(texts: Mapping[str, str], depth: int = 0) -> str:
    """A pattern for the longest of some texts that is there, each with what must hold after it.

    A vocabulary may have thousands of control tokens: what they have in common is compared once, and compiled once.
    """
    groups: dict[str, dict[str, str]] = {}
    for text, after in texts.items():
        groups.setdefault(text[:1], {})[text] = after
    ends_here = groups.pop("", None)
    patterns = []
    for group in groups.values():
        if len(group) == 1 or depth == MOST_NESTED:
            longest_first = sorted(group, key=len, reverse=True)
            patterns += [re.escape(text) + group[text] for text in longest_first]
        else:
            first, last = min(group), max(group)
            common = next(
                (at for at, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1), len(first)
            )
            rest = {text[common:]: after for text, after in group.items()}
            patterns.append(re.escape(first[:common]) + _longest_of(rest, depth + 1))
    patterns += ends_here.values() if ends_here else ()
    return f"(?:{'|'.join(patterns)})"


def _append_text(pieces: list[str | int], text: str, *, left: bool, right: bool) -> None:
    text = text.replace(GUARD, "")
    text = text.lstrip(WHITE_SPACE) if left else text
    text = text.rstrip(WHITE_SPACE) if right else text
    if text:
        pieces.append(text)
