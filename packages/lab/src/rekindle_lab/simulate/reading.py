"""Traces as files: Mooncake's hashed requests, and logs whose prompts are rendered and encoded here.

Owns the detection of a file's kind (by its first line) and the errors for bad lines. Mooncake's format (R. Qin et al.,
"Mooncake: Trading more storage for less computation", FAST 2025) is JSON lines of `timestamp` in milliseconds,
`input_length` in tokens and `hash_ids`, one per block, equal if the prompts are equal up to and including the block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import ConfigError
from rekindle_lab.simulate.trace import MOONCAKE, Trace, TraceBuilder, TraceOptions

MAX_LINE = 1 << 26  # bytes of the first line that are inspected
LIKELY_BLOCK_TOKENS = (512, 16, 32, 64, 128, 256, 1024)  # tried on traces that do not state it; Mooncake's first


@dataclass(frozen=True, slots=True)
class _Hashed:
    at_s: float
    num_tokens: int
    hash_ids: Sequence[int | str]


def read_trace(path: Path, options: TraceOptions, progress: Callable[[], None] = lambda: None) -> Trace:
    """Return the trace in a file of either kind; `progress` is called after each request of a log.

    ConfigError names the invalid line. A last line torn by a crash is an error too, except in recorded days.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{path} is no regular file: a trace is read more than once, write it to a file first")
    try:
        with path.open("rb") as file:
            first = next((line for line in iter(lambda: file.readline(MAX_LINE), b"") if line.strip()), b"")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        head = json.loads(first)
    except (ValueError, RecursionError):
        head = None
    if isinstance(head, dict) and "hash_ids" in head:
        if options.model is not None:
            raise ConfigError(f"{path} holds hashes of blocks, no text: --model has no meaning for it")
        return _read_hashed(path, options.block_tokens)
    from rekindle_lab.simulate.logs import read_log  # tokenizers and the parsers of all dialects: not for hashes

    return read_log(path, options, progress)


def _read_hashed(path: Path, block_tokens: int | None) -> Trace:
    requests = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                requests.append(_hashed(json.loads(line)))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: not a request of this trace: {error!r}") from None
    if not requests:
        raise ConfigError(f"{path} holds no requests")
    builder = TraceBuilder(_block_tokens(path, requests, block_tokens))
    for request in requests:
        builder.add_hashed(request.at_s, request.num_tokens, request.hash_ids)
    return builder.build(path.stem, MOONCAKE)


def _hashed(line: dict[str, Any]) -> _Hashed:
    at_s, num_tokens, hash_ids = float(line["timestamp"]) / 1e3, line["input_length"], line["hash_ids"]
    if not math.isfinite(at_s):
        raise ValueError(f"timestamp {line['timestamp']!r}")
    if not isinstance(num_tokens, int) or num_tokens < 0:
        raise ValueError(f"input_length {num_tokens!r}")
    if not isinstance(hash_ids, list) or not all(isinstance(hash_id, int | str) for hash_id in hash_ids):
        raise ValueError("hash_ids must be a list of numbers or strings")
    return _Hashed(at_s, num_tokens, hash_ids)


def _block_tokens(path: Path, requests: Sequence[_Hashed], given: int | None) -> int:
    """Return the tokens per hash with which every prompt has as many hashes as blocks."""
    for size in LIKELY_BLOCK_TOKENS if given is None else (given,):
        if all(-(-request.num_tokens // size) == len(request.hash_ids) for request in requests):
            return size
    if given is None:
        sizes = ", ".join(map(str, LIKELY_BLOCK_TOKENS))
        raise ConfigError(f"{path}: blocks of {sizes} tokens do not fit its lengths; say which: --block-tokens")
    wrong = next(each for each in requests if -(-each.num_tokens // given) != len(each.hash_ids))
    needed = -(-wrong.num_tokens // given)
    raise ConfigError(
        f"{path}: a prompt of {wrong.num_tokens} tokens has {len(wrong.hash_ids)} hashes, "
        f"in blocks of {given} tokens it would have {needed}"
    )
