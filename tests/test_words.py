"""The words of the code and its documents are the field's: what `grep` and a new reader look for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import ROOT, SOURCES

PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")]
PYTHON = [path for folder in (*SOURCES, ROOT / "benchmarks") for path in folder.rglob("*.py")]
SOURCES = sorted([*PYTHON, *(ROOT / "docs").glob("*.md"), *PAGES])
# What is refused, as words of prose or parts of a name, and what stands for it.
INSTEAD = {
    r"tells?|told|telling": "emit, notify, report, publish; distinguish",
    r"behind": "after",
    r"besides?": "next to, alongside, in addition to",
    r"for ever": "forever",
    r"g(o|oes|oing|one) on with": "resume, continue",
    r"no use of it": "does not update recency",
    r"is no turns?": "is not part of a turn",
    r"stands? on": "depends on; its ancestors",
    r"whoever|whomever": "the caller, the client, a thread that",
    r"mend(s|ed|ing)?": "repair, recover",
    r"gives? way|gave way": "yield",
    r"lets? go": "release",
    r"burn(s|ed|ing)?": "recomputed",
    r"foresee|foreseen|foresight": "anticipate",
    r"(re)?spelled": "encoded, serialized, written",
    r"orders? of leaving|leaving order": "eviction order",
    r"twins|unclaimed": "duplicate prompts, orphan blocks",
    r"upkeep": "agent_admin",
}
REFUSED = re.compile("|".join(rf"\b(?:{words})\b" for words in INSTEAD), re.IGNORECASE)
ALLOWED = re.compile(
    r"\bbehind (a|the) (\w+ )?proxy\b|\bbehind (nginx|Caddy)\b|\bwrite-behind\b|\.tell\(\)|: \"Told\"", re.IGNORECASE
)
# Words for models to read, not for us.
TEXTS = {
    "benchmarks/coding_day/texts.py",
    "packages/lab/src/rekindle_lab/bench/workload.py",
    "packages/lab/src/rekindle_lab/bench/replay/day_sessions.py",
}
TEXTS |= {"pocket/src/rekindle_pocket/conversations.py"}
BLOCKS = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def prose_of(path: Path) -> str:
    """A file's text; of a page not its blocks of code, whose lines are left empty."""
    text = path.read_text("utf-8")
    return text if path.suffix == ".py" else BLOCKS.sub(lambda block: "\n" * block.group().count("\n"), text)


def words_of(line: str) -> str:
    """A line with its names taken apart: `tell_progress` and `tellProgress` are two words each."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line).replace("_", " ")


def refused(text: str) -> Iterator[tuple[int, str]]:
    """Lines with a word that is refused, from 1, and the word."""
    for number, line in enumerate(text.splitlines(), 1):
        found = REFUSED.search(words_of(ALLOWED.sub("", line)))
        if found is not None:
            yield number, found.group()


def test_old_words_are_gone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word!r}"
        for path in SOURCES
        if path.relative_to(ROOT).as_posix() not in TEXTS
        for number, word in refused(prose_of(path))
    ]
    meant = "\n".join(f"{words}: {term}" for words, term in INSTEAD.items())
    assert not found, "\n".join([f"{len(found)} lines use words that these replace:", meant, *found])


FOUND = ("whoever asks", "self._tell(event)", "class ToldOnce:", "what stands on it", "Mended.", "behind the block")
NOT_FOUND = ("behind a proxy", "[Behind a proxy](proxy.md)", "understand one", "the burst", "tellurium")


@pytest.mark.parametrize("line", FOUND)
def test_a_refused_word_is_found(line: str) -> None:
    assert list(refused(line)), line


@pytest.mark.parametrize("line", NOT_FOUND)
def test_other_words_are_not(line: str) -> None:
    assert not list(refused(line)), line
