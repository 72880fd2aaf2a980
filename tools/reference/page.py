"""Pages of docs/ with a part generated from the code, between `<!-- made: NAME -->` and `<!-- end -->`.

The text around that part is written by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
END = "<!-- end -->"


def path(name: str) -> Path:
    """Return the path of a page."""
    return DOCS / f"{name}.md"


def page(name: str, part: str) -> str:
    """Return the page with its generated part replaced; ValueError if it has no markers for one."""
    begin = f"<!-- made: {name} -->"
    before, found, rest = path(name).read_text("utf-8").partition(begin)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"docs/{name}.md has no {begin} with {END} after it")
    return f"{before}{begin}\n{part}\n{END}{after}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def sentence(text: str) -> str:
    """Capitalise the text and end it with a full stop."""
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."
