"""The bytes of every token id: a table per vocabulary for keys, byte ends, streams and checks.

A *key* is text as comparable bytes: UTF-8 of the text as the tokenizer normalises it, and for a control token 0xFF and
four bytes 0x80 | 6 bits of its id. 0xFF never occurs in UTF-8, and all bytes of a code but the first look like the
inside of a character, so one test of character boundaries works for text and tokens. Byte ends are a running sum of the
table's lengths and are not stored. Ids that no token has are codes as well: they match nothing in a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from rekindle.text.controls import BLANK, AddedToken

MARK = b"\xff"
CODE_BYTES = 5
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def control_code(token_id: int) -> bytes:
    """The five bytes of a control token in a key; ids have 24 bits."""
    return MARK + bytes(0x80 | (token_id >> shift) & 0x3F for shift in (18, 12, 6, 0))


def control_id(code: bytes) -> int:
    """The id in the four bytes after the mark."""
    return (code[0] & 0x3F) << 18 | (code[1] & 0x3F) << 12 | (code[2] & 0x3F) << 6 | code[3] & 0x3F


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
