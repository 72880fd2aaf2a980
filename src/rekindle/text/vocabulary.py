"""Control tokens, and the bytes of every token id: a table per vocabulary for keys, byte ends, streams and checks.

A *key* is text as comparable bytes: UTF-8 of the text as the tokenizer normalises it, and for a control token 0xFF and
four bytes 0x80 | 6 bits of its id. 0xFF never occurs in UTF-8, and all bytes of a code but the first look like the
inside of a character, so one test of character boundaries works for text and tokens. Byte ends are a running sum of the
table's lengths and are not stored. Ids that no token has are codes as well: they match nothing in a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rekindle.errors import ModelRefused
from rekindle.text.messages import GUARD, PIECE_CHARS

MARK = b"\xff"
CODE_BYTES = 5
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Unicode White_Space, which is what the library strips; Python's str.strip() would take U+001C to U+001F as well.
WHITE_SPACE = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
)
BLANK = "\u2581"  # ▁, the sign for a space inside sentencepiece tokens

MOST_NESTED = 20  # groups in a pattern; `re` itself follows a few hundred
MOST_IDS = 1 << 24  # the number of ids that keys can encode


# Control tokens: which added tokens structure a prompt, and how look-alikes in content are kept apart.
#
# A control token is flagged special, or it is an added token that the chat template names (blank runs excepted).
# Content may hold the same characters: there they are text. So before a template runs, a guard character is inserted
# into every look-alike; after it, unguarded occurrences are tokens, and the guards are removed. The guard is refused in
# input, so no client can insert one.
#
#     content  "say <|im_end|>"  -guard-▶  "say <⟂|im_end|>"  -template-▶  "...<⟂|im_end|><|im_end|>"
#     -split-▶  "...<|im_end|>", token


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
        self._longest = max((len(token.content) for token in tokens), default=0)

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
        for found in _found_in(text, self._pattern, self._longest) if self._pattern else ():
            token = self.by_content[found.group()]
            _append_text(pieces, text[end : found.start()], left=strip_next, right=token.lstrip)
            pieces.append(token.id)
            end, strip_next = found.end(), token.rstrip
        _append_text(pieces, text[end:], left=strip_next, right=False)
        return pieces


class _Guard:
    """Inserts the guard into every occurrence of some texts, overlapping ones too."""

    def __init__(self, contents: Sequence[str]) -> None:
        rests: dict[str, dict[str, str]] = {}
        for content in contents:
            rests.setdefault(content[0], {})[content[1:]] = ""
        # A pattern that begins with characters finds them ten times faster than one that looks ahead everywhere.
        self._starts = re.compile(
            "|".join(f"{re.escape(first)}(?={_longest_of(rest)})" for first, rest in rests.items())
        )
        self._first = rests.keys()
        self._beginnings = {content[:end] for content in contents for end in range(1, len(content))}
        self._longest = max((len(beginning) for beginning in self._beginnings), default=0)

    def apply(self, text: str) -> str:
        if not any(char in text for char in self._first):
            return text
        ends = [0, *(found.end() for found in _found_in(text, self._starts, self._longest)), len(text)]
        guarded = GUARD.join(text[start:end] for start, end in pairwise(ends))
        # What follows in the template or in the next content may complete a token that begins here.
        last = (text[-length:] for length in range(1, min(self._longest, len(text)) + 1))
        dangling = any(end in self._beginnings and end.strip(WHITE_SPACE) for end in last)
        return guarded + GUARD if dangling else guarded


def _found_in(text: str, pattern: re.Pattern[str], longest: int) -> Iterator[re.Match[str]]:
    """Yield what `pattern.finditer(text)` would, from pieces: while one is looked through, no other thread runs.

    `longest`: how many characters decide whether there is a match, up to one after it.
    """
    at = 0
    for end in range(PIECE_CHARS, len(text) + PIECE_CHARS, PIECE_CHARS):
        for found in pattern.finditer(text, at, end + longest):
            if found.start() >= end:
                break
            yield found
            at = found.end()
        at = max(at, end)


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


def control_code(token_id: int) -> bytes:
    """The five bytes of a control token in a key; ids have 24 bits."""
    return MARK + bytes(0x80 | (token_id >> shift) & 0x3F for shift in (18, 12, 6, 0))


def control_id(code: bytes) -> int:
    """The id in the four bytes after the mark."""
    return (code[0] & 0x3F) << 18 | (code[1] & 0x3F) << 12 | (code[2] & 0x3F) << 6 | code[3] & 0x3F


def pieces_of(key: bytes) -> Iterator[bytes | int]:
    """The texts and control ids of a key that begins on a boundary, in order; no empty text."""
    start = 0
    while (mark := key.find(MARK, start)) >= 0:
        if start < mark:
            yield key[start:mark]
        start = mark + CODE_BYTES
        if start <= len(key):
            yield control_id(key[mark + 1 : start])
    if start < len(key):
        yield key[start:]


def on_boundary(key: bytes, end: int) -> bool:
    """Whether `end` is between two characters (or codes) of the key."""
    return end >= len(key) or key[end] & 0xC0 != 0x80


def agreeing(one: bytes, other: bytes) -> int:
    """Count the leading bytes that agree, by bisection: slices compare in microseconds, a loop takes milliseconds."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Vocabulary:
    """Bytes and byte lengths of all token ids.

    `words` maps the model's token strings to ids, written in the byte alphabet (`byte_level`) or with ▁ and `<0xNN>`.
    """

    def __init__(
        self, words: Mapping[str, int], kept: Iterable[AddedToken], controls: Iterable[AddedToken], *, byte_level: bool
    ) -> None:
        controls, kept = list(controls), list(kept)
        ids = [*words.values(), *(token.id for token in (*controls, *kept))]
        self.size = max(ids, default=-1) + 1
        self._shown: list[bytes] = [b""] * self.size
        self._in_key = [b""] * self.size
        self._is_control = np.zeros(self.size + 1, dtype=np.bool_)
        self._special = {token.id: token.content.encode() for token in controls if token.special}
        to_bytes = _byte_level_decoder() if byte_level else _sentencepiece_bytes
        for word, token_id in words.items():
            self._in_key[token_id] = self._shown[token_id] = to_bytes(word)
        for token in kept:
            text = token.content if byte_level else token.content.replace(BLANK, " ")
            self._in_key[token.id] = self._shown[token.id] = text.encode()
        for token in controls:
            self._shown[token.id] = b"" if token.special else token.content.encode()
            self._is_control[token.id] = True
        # Codes are not UTF-8: where keys are checked, five ASCII bytes replace them. Found by id, because a model may
        # generate the bytes of a code.
        self._as_text = [*self._shown, b"-" * CODE_BYTES]
        text_ids = {*words.values(), *(token.id for token in kept)} - {token.id for token in controls}
        for token_id in {*range(self.size)} - text_ids:
            self._in_key[token_id], self._as_text[token_id] = control_code(token_id), b"-" * CODE_BYTES
        self._lengths = np.array([len(text) for text in self._as_text], dtype=np.int32)
        self.longest = int(self._lengths.max())  # bytes of one token, and of a code

    def as_codes(self) -> Vocabulary:
        """The same vocabulary with every token as a code: text is then compared by ids only."""
        table = object.__new__(Vocabulary)
        table.size, table._shown, table._is_control = self.size, self._shown, self._is_control
        table._special, table.longest = self._special, self.longest
        table._in_key = [control_code(token_id) for token_id in range(self.size)]
        table._as_text = [b"-" * CODE_BYTES] * (self.size + 1)
        table._lengths = np.full(self.size + 1, CODE_BYTES, dtype=np.int32)
        return table

    @property
    def special_ids(self) -> Set[int]:
        """The ids of tokens flagged special."""
        return self._special.keys()

    def is_control_token(self, token_id: int) -> bool:
        """Whether the id is a control token; ids out of range are not."""
        return 0 <= token_id < self.size and bool(self._is_control[token_id])

    def shown(self, token_id: int) -> bytes:
        """What a reader sees of a token: nothing for tokens flagged special and ids out of range."""
        return self._shown[token_id] if 0 <= token_id < self.size else b""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token: as `shown`, and for tokens flagged special their content."""
        return self._special.get(token_id) or self.shown(token_id)

    def byte_ends(self, ids: np.ndarray) -> np.ndarray:
        """Where each token ends in the key of these ids [len(ids)], int64."""
        if len(ids) and int(ids.max()) > self.size:
            ids = np.minimum(ids, self.size)
        return np.cumsum(self._lengths[ids], dtype=np.int64)

    def key(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The key of these ids, up to the first byte that is not UTF-8."""
        wanted = np.minimum(np.asarray(ids, dtype=np.int64), self.size).tolist()
        try:
            b"".join(map(self._as_text.__getitem__, wanted)).decode("utf-8")
            end = None
        except UnicodeDecodeError as error:
            end = error.start
        if self.size in wanted:
            parts = (self._in_key[at] if at < self.size else control_code(int(ids[n])) for n, at in enumerate(wanted))
            return b"".join(parts)[:end]
        return b"".join(map(self._in_key.__getitem__, wanted))[:end]

    def control_positions(self, ids: np.ndarray) -> np.ndarray:
        """Indices of the control tokens among these ids."""
        return np.flatnonzero(self._is_control[np.minimum(ids, self.size)])


def _byte_level_decoder() -> Callable[[str], bytes]:
    table = byte_alphabet()

    def to_bytes(word: str) -> bytes:
        try:
            return bytes(table[char] for char in word)
        except KeyError:
            return word.encode("utf-8", "replace")

    return to_bytes


def byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet (Radford et al. 2019): printable Latin-1 maps to itself, the rest from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in own]
    return {**{chr(byte): byte for byte in own}, **{chr(0x100 + at): byte for at, byte in enumerate(others)}}


def _sentencepiece_bytes(word: str) -> bytes:
    found = _BYTE_TOKEN.fullmatch(word) if word.startswith("<0x") else None
    return bytes([int(found[1], 16)]) if found else word.replace(BLANK, " ").encode("utf-8", "replace")
