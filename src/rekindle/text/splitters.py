"""Where tokenising can resume inside a text without changing the ids of the whole.

A *safe cut* is a place where the tokenizer restarts regardless of the text before it: next to a control token, and, for
splitters known to look no further than this assumes, the start of a pre-token that contains a non-space character and
ends strictly before the first difference. Only such a pre-token is settled: what follows may lengthen the last one, and
a run of blanks is split depending on what follows it.

Long texts are not split from their start. In every known pattern no pre-token holds a space after another character, so
a space after a visible ASCII character begins one; splitting a window from such a place gives the same pre-tokens.

A text that is complete is encoded in pieces, each cut where a pre-token begins after a character that is no blank: the
ids of the pieces are those of the whole, and the tokenizer never holds more than a piece in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import pre_tokenizers

from rekindle.errors import BadRequest
from rekindle.text.vocabulary import CODE_BYTES, MARK, WHITE_SPACE, AddedToken, on_boundary

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+"
_CAPS = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n"
_PUNCTUATION_QWEN = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# cl100k (Llama 3, GLM 4), Qwen 2 and 3, Qwen 3.5
CL100K = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}]*|{_BLANKS}"
QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION}]*|{_BLANKS}"
QWEN35 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|{_PUNCTUATION_QWEN}|{_BLANKS}"
O200K = rf"{_CASED}{_CONTRACTION}?|{_CAPS}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_PUNCTUATION}/]*|{_BLANKS}"
TEKKEN = rf"{_CASED}|{_CAPS}|\p{{N}}|{_PUNCTUATION}/]*|{_BLANKS}"
# Three splits, one after the other
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    rf"{_PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
)
# Splits before or after one of the above, which look at nothing outside their own matches
DIGIT, NUMBER, THREE_DIGITS = r"\p{N}", r"\p{N}+", "[0-9][0-9][0-9]"
PUNCTUATION, PUNCTUATION_FALCON = r"[\p{P}\$\+<=>\^~\|]+", r"[\p{P}\$\+<=>\^~\|`]+"

KNOWN_PATTERNS = frozenset(
    (
        *(GPT2, CL100K, QWEN2, QWEN35, O200K, TEKKEN, *DEEPSEEK3),
        *(DIGIT, NUMBER, THREE_DIGITS, PUNCTUATION, PUNCTUATION_FALCON),
    )
)
_RESUMABLE = re.compile(rb"[\x21-\x7e](?=\x20)")
_FIRST_WINDOW = 512
PIECE_BYTES = 64 << 10
WINDOWS = 16  # parts of a piece that are split one after the other
LONGEST_WORD = 1 << 20  # bytes of one pre-token: regular expressions panic on ten million blanks


def is_known(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether the pre_tokenizer of a tokenizer.json cuts text only in ways that `SafeCuts` understands."""
    if pre_tokenizer is None:
        return False
    parts = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    return all(_is_known_part(part) for part in parts) and any(_cuts(part) for part in parts)


def _is_known_part(part: Mapping[str, Any]) -> bool:
    match part["type"]:
        case "ByteLevel" | "Digits":
            return True
        case "Metaspace":
            return bool(part.get("split", True))
        case "Split":
            pattern = part["pattern"].get("Regex")
            return pattern in KNOWN_PATTERNS and part["behavior"] == "Isolated" and not part.get("invert", False)
    return False


def _cuts(part: Mapping[str, Any]) -> bool:
    """Whether this part alone keeps every pre-token from holding a space after another character."""
    if part["type"] == "ByteLevel":
        return bool(part.get("use_regex", True))
    return part["type"] == "Metaspace" or (part["type"] == "Split" and r"\s+" in part["pattern"].get("Regex", ""))


class SafeCuts:
    """Finds safe cuts in keys. `splitter` is None if only control tokens are safe.

    Added tokens that are text (`kept`) are matched before splitting: no cut is inside one, each is its own pre-token.
    """

    def __init__(self, splitter: pre_tokenizers.PreTokenizer | None, kept: Sequence[AddedToken] = ()) -> None:
        contents = sorted((token.content.encode() for token in kept), key=len, reverse=True)
        odd = any(token.single_word or _RESUMABLE.search(token.content.encode()) for token in kept)
        self._splitter = None if odd else splitter
        self._kept = re.compile(b"|".join(map(re.escape, contents))) if contents else None
        self._longest_kept = max(map(len, contents), default=0)
        self._kept_beginnings = {text[:size] for text in contents for size in range(1, len(text))}

    def before(self, key: bytes, limit: int, divergence: int) -> Iterator[int]:
        """Yield safe cuts at or before byte `limit`, last first; key and stored text agree up to `divergence`.

        The last one yielded is next to a control token or 0: a token boundary in all ids of this text.
        """
        mark = key.rfind(MARK, 0, limit)
        segment = mark + CODE_BYTES if mark >= 0 else 0
        if segment > limit:
            yield mark
            return
        if self._splitter is not None:
            settled = self._settled(key, segment, divergence)
            yield from self._pre_tokens(self._splitter, key, segment, min(limit, settled), settled)
        yield segment

    def pieces(self, text: bytes, *, size: int = PIECE_BYTES) -> Iterator[bytes]:
        """Yield the text between two control tokens in pieces of about `size` bytes whose ids are those of the whole.

        If the splitter is unknown, it is one piece. BadRequest for a word too long for the tokenizer.
        """
        start = 0
        while self._splitter is not None and len(text) - start > size:
            end = self._piece_end(self._splitter, text, start, size)
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]

    def _piece_end(self, splitter: pre_tokenizers.PreTokenizer, text: bytes, start: int, size: int) -> int:
        """The last cut in a piece of about `size` bytes from `start`.

        Where no space begins a pre-token it is found by splitting. No other thread runs meanwhile, so small windows are
        split, each from the cut in the one before.
        """
        at = _last_resumable(text, start, start + size)
        if at is not None:
            return at
        window, end = max(1, size // WINDOWS), start
        while end < len(text) and end - start <= size - window:
            end = self._window_end(splitter, text, end, window)
        return end

    def _window_end(self, splitter: pre_tokenizers.PreTokenizer, text: bytes, start: int, size: int) -> int:
        """The last cut in a window from `start`, as large as needed to hold one."""
        while start + size < len(text):
            end = start + size
            at = _last_resumable(text, start, end)
            if at is not None:
                return at
            while not on_boundary(text, end):
                end -= 1
            words = list(self._split(splitter, text, start, end))
            for at, word in reversed(words):
                if at > start and at + len(word.encode()) < end and not _is_blank(text, at):
                    return at
            if size >= LONGEST_WORD:
                raise BadRequest("the prompt holds more than a million characters in a row that are one word")
            size *= 4
        return len(text)

    def _settled(self, key: bytes, segment: int, divergence: int) -> int:
        """The end of the text that both certainly share: an added token that may have begun is not settled."""
        for size in range(min(self._longest_kept - 1, divergence - segment), 0, -1):
            if key[divergence - size : divergence] in self._kept_beginnings:
                return divergence - size
        return divergence

    def _pre_tokens(
        self, splitter: pre_tokenizers.PreTokenizer, key: bytes, segment: int, limit: int, divergence: int
    ) -> Iterator[int]:
        """Yield starts of settled pre-tokens in (segment, limit], last first, from windows of growing size."""
        below, size = limit + 1, _FIRST_WINDOW
        while below > segment + 1:
            start = self._resumable(key, segment, limit - size, limit)
            end = min(divergence, limit + size)
            mark = key.find(MARK, limit, end)
            end = mark if mark >= 0 else end
            while not on_boundary(key, end):
                end -= 1
            if start is not None:
                for at, text in reversed(list(self._split(splitter, key, start, end))):
                    settled = mark >= 0 or at + len(text.encode()) < end
                    if segment < at < below and settled and text.strip(WHITE_SPACE):
                        below = at
                        yield at
            if start == segment:
                return
            size *= 8

    def _resumable(self, key: bytes, segment: int, earliest: int, limit: int) -> int | None:
        """The first place from `earliest` where a pre-token begins in any case; None: look further back."""
        if earliest <= segment:
            return segment
        found = _RESUMABLE.search(key, earliest, limit)
        return found.end() if found else None

    def _split(
        self, splitter: pre_tokenizers.PreTokenizer, key: bytes, start: int, end: int
    ) -> Iterator[tuple[int, str]]:
        """Yield (byte offset, text) of the pre-tokens of key[start:end], in order."""
        at = start
        # A token that begins in this window and ends after it counts as well.
        whole = key.find(MARK, end)
        last = min(end + self._longest_kept, whole if whole >= 0 else len(key))
        for found in self._kept.finditer(key, start, last) if self._kept else ():
            if found.start() >= end:
                break
            yield from _pre_tokens_of(splitter, key[at : found.start()], at)
            if found.end() > end:
                return
            yield found.start(), found.group().decode()
            at = found.end()
        yield from _pre_tokens_of(splitter, key[at:end], at)


def _last_resumable(text: bytes, start: int, end: int) -> int | None:
    """The last space after a visible ASCII character inside (start, end)."""
    at = text.rfind(b" ", start + 1, end)
    while at > start and not 0x21 <= text[at - 1] <= 0x7E:
        at = text.rfind(b" ", start + 1, at)
    return at if at > start else None


def _is_blank(text: bytes, end: int) -> bool:
    """Whether the character before `end` is a blank."""
    return text[max(0, end - 4) : end].decode("utf-8", "ignore").endswith(tuple(WHITE_SPACE))


def _pre_tokens_of(splitter: pre_tokenizers.PreTokenizer, data: bytes, at: int) -> Iterator[tuple[int, str]]:
    text = data.decode("utf-8", "ignore")
    done = 0
    for _, (first, last) in splitter.pre_tokenize_str(text):
        at += len(text[done:first].encode())
        yield at, text[first:last]
        at += len(text[first:last].encode())
        done = last
