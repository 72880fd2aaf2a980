"""What a model is checked on at load: a text of prose, code, data and a conversation, as agents meet them, and
ids drawn at random where any ids do."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from rekindle.text.tokenizer import FILE_NAME, whole_tokenizer

OWN_TEXT = "check_text.txt"
CHECK_TEXT = '''\
The lighthouse keeper wrote the weather into a ledger every evening: wind, cloud, the height of the sea, the hour at
which the lamp was lit. In forty years she missed two entries, both in the winter when her brother was ill. When the
lamp was made automatic in 1974, the ledgers went to the county museum, where a student found that they were the only
unbroken record of that coast. He compared them with the tide gauges of three harbours and could show that storms had
not become more frequent, but that the strongest ones arrived about eleven days earlier in the year than before.

def moving_average(values: list[float], width: int) -> list[float]:
    """Return the mean of each window of `width` values; ValueError if there are fewer."""
    if width < 1 or len(values) < width:
        raise ValueError(f"need at least {width} values, got {len(values)}")
    total = sum(values[:width])
    means = [total / width]
    for index in range(width, len(values)):
        total += values[index] - values[index - width]
        means.append(total / width)
    return means

{"order": 48213, "customer": {"name": "Imre Kovács", "city": "Szeged"}, "items": [{"sku": "B-204", "count": 3,
"price": 12.50}, {"sku": "K-77", "count": 1, "price": 149.00}], "total": 186.50, "paid": true, "note": null}

User: The build fails on the second machine with "undefined symbol: png_read_info". What should I check first?
Assistant: That symbol belongs to libpng, so the linker found the header but not the library. Run `ldd ./viewer | grep
png` on both machines. If the second one shows "not found", install the package that has the shared library; if it shows
another version than the first, rebuild there, because the binary was linked against an older interface. Only then look
at the order of the libraries on the command line: -lpng must come after the objects that use it.
User: It says libpng16.so.16 => not found.
Assistant: Then install libpng16-16 and run the program again. Nothing has to be compiled for that.

1. Water boils at 100 degrees Celsius at sea level, and at about 90 degrees at 3,000 metres.
2. The Treaty of Westphalia was signed in 1648, in Münster and Osnabrück.
3. La bibliothèque est fermée le lundi, mais on peut rendre les livres dans la boîte à l'entrée.
4. The derivative of x^3 - 2x is 3x^2 - 2, which is zero where x is the square root of 2/3, positive or negative.
'''


def text_ids(directory: Path) -> torch.Tensor:
    """The text as ids of a model directory's tokenizer, with the tokens that it puts first: some 600 to 700.

    A model that knows little of that can bring a text of its own, `check_text.txt`. ModelRefused if its tokenizer.json
    is missing or cannot be used.
    """
    written = (path.stat().st_mtime_ns for path in (directory / OWN_TEXT, directory / FILE_NAME) if path.is_file())
    return torch.tensor(_encoded(directory, tuple(written)), dtype=torch.int64)


@lru_cache(maxsize=1)
def _encoded(directory: Path, written: tuple[int, ...]) -> tuple[int, ...]:
    """Read once in each state of the files: a start asks three times, and a large tokenizer takes seconds."""
    own = directory / OWN_TEXT
    text = own.read_text("utf-8") if own.is_file() else CHECK_TEXT
    encoding = whole_tokenizer(directory).encode(text)
    last = max((at for at, added in enumerate(encoding.special_tokens_mask) if not added), default=-1)
    return tuple(encoding.ids[: last + 1])


def checked_ids(directory: Path, vocab_size: int, count: int) -> torch.Tensor:
    """The first `count` ids of the text, or all if it has fewer; of as many ids drawn at random if the directory has no
    tokenizer, or one with more tokens than the model."""
    if (directory / FILE_NAME).is_file():
        ids = text_ids(directory)
        if int(ids.max()) < vocab_size:
            return ids[:count]
    return check_tokens(vocab_size, count)


def check_tokens(vocab_size: int, count: int) -> torch.Tensor:
    """A fixed pseudo-random token sequence [count], the same on every machine and in every release."""
    state, ids = 0x9E3779B97F4A7C15, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        ids.append((state >> 33) % vocab_size)
    return torch.tensor(ids, dtype=torch.int64)
