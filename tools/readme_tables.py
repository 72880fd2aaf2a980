"""Write the benchmark table of the README from the JSON lines of a run: figures are never typed by hand.

rekindle bench engine MODEL --out measured/engine.jsonl
python tools/readme_tables.py measured/engine.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
SHOWN_SETTINGS = ("kv", "threads", "context", "block_tokens", "repeats")
BEGIN, END = "<!-- measured: engine -->", "<!-- end -->"
Line = dict[str, Any]


def shown(line: Line | None) -> str:
    """The median in its unit, with the range where it was taken more than once."""
    if line is None:
        return ""
    median, low, high = (
        f"{line[name]:.3g}" if line[name] < 1000 else f"{line[name]:,.0f}" for name in ("median", "min", "max")
    )
    return f"{median} {line['unit']}" + (f" ({low}-{high})" if len(line["values"]) > 1 else "")


def table(lines: list[Line]) -> str:
    """One row per measure, both arms beside one another, and where the figures come from."""
    by_measure: dict[str, dict[str, Line]] = {}
    for line in lines:
        by_measure.setdefault(line["measure"], {})[line["arm"]] = line
    rows = ["| measure | Rekindle | `transformers` alone |", "|---|--:|--:|"]
    rows += [
        f"| {name} | {shown(arms.get('rekindle'))} | {shown(arms.get('transformers'))} |"
        for name, arms in by_measure.items()
    ]
    first = lines[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if name != "rekindle")
    machine = f"{first['machine']['processor']}, {first['machine']['cores']} cores"
    settings = ", ".join(f"{name} {first['settings'][name]}" for name in SHOWN_SETTINGS)
    origin = f"{machine}; {versions}; {settings}; {first['date']}, commit {first['commit'][:12]}"
    return "\n".join([*rows, "", f"Median (lowest-highest). {origin}."])


def main() -> None:
    """Replace what stands between the markers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("lines", type=Path)
    lines = [json.loads(text) for text in parser.parse_args().lines.read_text("utf-8").splitlines()]
    before, _, rest = README.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{table(lines)}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
