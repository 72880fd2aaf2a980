"""A batch of prompts in a text file: detection and parsing.

Owns what counts as text, and where a prompt ends: at the end of its line or at a separator. Does not read logs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import ConfigError
from rekindle.text.messages import sound
from rekindle_lab.analyze.shapes import parsed

LINES_LOOKED_AT = 100
MAX_BYTES = 2 << 30  # a batch is held whole
ESCAPES = {r"\n": "\n", r"\t": "\t", r"\0": "\0", r"\r": "\r", r"\f": "\f"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and its human-readable place."""

    place: str
    text: str


def holds_prompts(path: Path) -> bool:
    """Whether a file is text rather than JSON of any form; False if it is empty or cannot be read.

    JSON means that most lines hold an object each, or that the file is one array or object, possibly truncated or
    longer than the lines inspected. Lines of text may begin like JSON, or be a word in quotes.
    """
    try:
        with path.open("rb") as file:
            lines = [line for _, line in zip(range(LINES_LOOKED_AT), file, strict=False)]
    except OSError:
        return False
    texts = [line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace") for line in lines if line.strip()]
    num_entries = sum(map(_is_entry, texts))
    return bool(texts) and 2 * num_entries <= len(texts) and not _is_one_value(texts)


def read_prompts(path: Path, separator: str | None) -> list[Prompt]:
    r"""Return the non-empty prompts of a file. ConfigError if it holds none or cannot be read.

    `separator` None: every line is a prompt. Otherwise the text between two separators is one, without surrounding
    line ends; `\n`, `\t`, `\0` and the like in the separator mean what they do in C.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES >> 30} GiB: a batch is held in memory, split it")
        text = path.read_bytes().decode("utf-8-sig", "replace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if separator == "":
        raise ConfigError("--separator is empty: give the text between two prompts, such as '\\n\\n'")
    if separator is None:
        word, parts = "line", re.split("\r?\n", text)
    else:
        word, parts = "prompt", [part.strip("\r\n") for part in text.split(_unescaped(separator))]
    prompts = [Prompt(f"{word} {at}", sound(part)) for at, part in enumerate(parts, start=1) if part.strip()]
    if not prompts:
        raise ConfigError(f"{path} holds no prompt: it is empty")
    return prompts


def _unescaped(separator: str) -> str:
    for escape, character in ESCAPES.items():
        separator = separator.replace(escape, character)
    return separator


def _is_entry(line: str) -> bool:
    """Whether a line is JSON as loggers write it: an object, or one in a string."""
    try:
        return isinstance(parsed(json.loads(line)), Mapping)
    except (ValueError, RecursionError):
        return False


def _is_one_value(lines: Sequence[str]) -> bool:
    """Whether the lines are one array or object, or the beginning of one, with nothing else after it."""
    text = "".join(lines).strip()
    if not text.startswith(("[", "{")):
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        end = error.pos
    except RecursionError:
        return True
    return end >= len(text)
