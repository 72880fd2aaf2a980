"""Run `rekindle demo` and draw its terminal, for light and dark pages: docs/demo-light.svg and docs/demo-dark.svg.

python tools/demo_picture.py
python tools/demo_picture.py --from demo.ansi    # what `script -qc 'rekindle demo' demo.ansi` recorded

Run it on a quiet machine: the times in the picture are those of this run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = 116
LINE_ABOVE = re.compile(r"[^\n]*\n[^\n]*\x1b\[1A")  # a line that the terminal went back to and wrote over
ERASED = re.compile(r".*(?:\r|\x1b\[2K)|\x1b\[\?25[lh]")
ANSI_LIGHT = [(36, 41, 47), (179, 29, 40), (17, 99, 41), (130, 80, 0), (9, 105, 218), (110, 60, 160), (27, 124, 131)]
ANSI_DARK = [
    (72, 79, 88),
    (255, 123, 114),
    (63, 185, 80),
    (210, 153, 34),
    (88, 166, 255),
    (188, 140, 255),
    (57, 197, 207),
]
THEMES = {
    "light": TerminalTheme((255, 255, 255), (36, 41, 47), [*ANSI_LIGHT, (110, 119, 129)]),
    "dark": TerminalTheme((13, 17, 23), (230, 237, 243), [*ANSI_DARK, (177, 186, 196)]),
}


def run_demo() -> str:
    """What the demo prints in a terminal of `COLUMNS` columns, with its colours."""
    command = [str(Path(sys.executable).with_name("rekindle")), "demo"]
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout.decode()


def draw(printed: str, theme: TerminalTheme) -> str:
    """An SVG of the terminal. It loads no font from elsewhere: pages that show it would refuse that."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(Text("$ rekindle demo", style="bold"))
    for line in LINE_ABOVE.sub("", printed).rstrip().split("\n"):
        console.print(Text.from_ansi(ERASED.sub("", line)))
    form = re.sub(r"@font-face\s*{{.*?}}\s*}}|@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="rekindle demo", theme=theme, code_format=form, unique_id="demo")


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--from", dest="recorded", type=Path, help="a recorded run instead of a new one")
    given = parser.parse_args()
    printed = given.recorded.read_bytes().decode() if given.recorded else run_demo()
    for name, theme in THEMES.items():
        (DOCS / f"demo-{name}.svg").write_text(draw(printed, theme), "utf-8")


if __name__ == "__main__":
    main()
