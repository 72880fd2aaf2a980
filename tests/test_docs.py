"""Documents hang together: the index has all of them, links lead somewhere, figures stand where they are taken from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.requirements import PAGE, is_tests, requirements

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MEASURED = re.compile(r"<!-- measured: .+? -->\n.*?<!-- end -->", re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What headings of a page are linked by."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_index_has_every_page() -> None:
    listed = re.findall(r"^\| \[.+?\]\((.+?)\) \|", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith(("http://", "https://")):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_measured_tables_are_on_the_page_of_measurements() -> None:
    page = (ROOT / "docs" / "measurements.md").read_text()
    assert len(MEASURED.findall(page)) >= 3
    for other in PAGES:
        assert [block for block in MEASURED.findall(other.read_text()) if block not in page] == []


def test_figures_of_the_readme_are_on_the_page_of_measurements() -> None:
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs" / "measurements.md").read_text()
    claims = readme[readme.index("## What others do not do") : readme.index("## Features")]
    figures = re.findall(r"\d[\d,.]*\d? (?:ms|s|%|bytes|of \d+)\b|\d[\d,.]*\d? %", claims)
    assert len(figures) >= 15
    assert [figure for figure in figures if figure not in page] == []
    rows = [line for line in readme[readme.index("## Measured") :].splitlines() if line.startswith("|")]
    assert rows and [row for row in rows if row not in page] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_every_requirement_names_commands_that_are_there() -> None:
    rows = requirements(PAGE.read_text())
    assert [row.number for row in rows] == list(range(1, 47))
    makefile = (ROOT / "Makefile").read_text()
    for row in rows:
        assert row.commands, row.number
        for command in row.commands:
            if is_tests(command):
                assert [path for path in command.split() if not (ROOT / path).exists()] == []
            elif command.startswith("make "):
                assert f"\n{command.split()[1]}:" in makefile
            else:
                assert command.startswith(("rekindle ", "python -m benchmarks ")), command
