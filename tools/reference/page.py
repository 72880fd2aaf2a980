"""Pages of docs/ with a part that is made from the code, between `<!-- made: NAME -->` and `<!-- end -->`.

What is around that part is written by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
END = "<!-- end -->"


def path(name: str) -> Path:
    """Where the page of this name lies."""
    return DOCS / f"{name}.md"


def page(name: str, part: str) -> str:
    """The page with this part in place of the one it has; ValueError where it has no place for one."""
    begin = f"<!-- made: {name} -->"
    before, found, rest = path(name).read_text("utf-8").partition(begin)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"docs/{name}.md has no {begin} with {END} after it")
    return f"{before}{begin}\n{part}\n{END}{after}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def sentence(text: str) -> str:
    """With a capital at its beginning and a full stop at its end."""
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."
