"""Write a measured table of docs/measurements.md, and of the README, from the JSON lines of a run.

rekindle bench engine MODEL --out measured/engine.jsonl
python tools/readme_tables.py measured/engine.jsonl
python -m benchmarks coordination --model MODEL --out measured/large.jsonl
python tools/readme_tables.py measured/large.jsonl --table "coordination, 24 layers"
rekindle bench engine MODEL --weights int8 --out measured/int8.jsonl
python tools/readme_tables.py measured/int8.jsonl --table "engine, int8"
python tools/readme_tables.py replay.jsonl      # docs/replay.md records it
rekindle bench engine MODEL --context 16384 --rows hot,warm --cold-repeats 1 --out measured/long.jsonl   # and 32768
python tools/readme_tables.py measured/long.jsonl --table "engine, long" --by context

Figures are never typed by hand. The table goes between `<!-- measured: NAME -->` and `<!-- end -->`; NAME is the
benchmark, or the argument of --table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs" / "measurements.md", ROOT / "README.md")
SHOWN_SETTINGS = {
    "engine": ("kv", "weights", "threads", "context", "block_tokens", "repeats"),
    "coordination": ("agents", "history", "tokens", "kv", "threads"),
    "replay": ("seed", "scale", "context", "speed"),
    "speculation": ("tokens", "kv", "threads", "repeats"),
    "structured": ("schemas", "seed"),
    "fidelity": ("positions", "context", "threads"),
    "start": ("kv", "repeats"),
    "loads": ("blocks", "repeats"),
    "restart": ("tokens", "repeats"),
    "wear": ("prompts", "conversations", "turns", "words"),
    "noisy": ("seconds", "mebibytes"),
    "multiple-choice": ("questions", "shots", "seed", "dtype", "kv"),
}
SHOWN_MEASURES = {
    "replay": (
        "first tokens, sum",
        "first token",
        "first tokens, sum, 10 min after a kill",
        "first tokens, sum, 10 min after a restart",
        "prompt tokens computed",
        "answers again after a kill",
        "errors",
        "replies unlike cold",
    ),
    "loads": tuple(f"{shape}: CPU of a block" for shape in ("bundled model", "24 layers", "8B")),
    "start": tuple(
        f"start, {model}, {kind}: {name}"
        for model in ("smollm2", "gemma")
        for kind in ("first", "again", "llama.cpp")
        for name in ("serving", "CPU", "memory", "peak memory")
    ),
}
BY_CONTEXT = ("cold", "hot EXTEND", "hot EXACT", "warm EXTEND, files cached", "warm EXTEND, files evicted")
ARMS = {
    "rekindle": "Rekindle",
    "transformers": "`transformers` alone",
    "openvino": "OpenVINO GenAI",
    "openvino:q8_0": "OpenVINO GenAI, q8_0",
    "llama.cpp:q8_0": "llama.cpp, q8_0",
    "off": "`--speculate off`",
    "auto": "`--speculate auto`",
}
END = "<!-- end -->"
Line = dict[str, Any]


def shown(line: Line | None) -> str:
    """Format the median in its unit, with the range if there are several values."""
    if line is None:
        return ""
    scale, unit = (100.0, "%") if line["unit"] == "share" else (1.0, line["unit"])
    if unit == "bytes" and line["median"] >= 2**20:
        scale, unit = 2.0**-20, "MiB"
    values = [scale * line[name] for name in ("median", "min", "max")]
    median, low, high = (f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in values)
    if "compared" in line["detail"]:
        return f"{median} of {line['detail']['compared']}"
    return f"{median} {unit}" + (f" ({low}-{high})" if len(line["values"]) > 1 else "")


def table(lines: list[Line]) -> str:
    """Build a table with a row per measure and a column per arm, and a line on where the figures come from."""
    by_measure: dict[str, dict[str, Line]] = {}
    first = lines[0]
    for line in lines:
        by_measure.setdefault(line["measure"], {})[line["arm"]] = line
    measures = SHOWN_MEASURES.get(first["bench"], tuple(by_measure))
    measures = tuple(name for name in measures if name in by_measure)
    arms = list(dict.fromkeys(line["arm"] for line in lines))
    rows = [f"| measure | {' | '.join(ARMS.get(arm, arm) for arm in arms)} |", "|---|" + "--:|" * len(arms)]
    for name in measures:
        rows.append(f"| {name} | {' | '.join(shown(by_measure.get(name, {}).get(arm)) for arm in arms)} |")
    return "\n".join([*rows, "", f"Median (lowest-highest). {origin(first, SHOWN_SETTINGS[first['bench']])}."])


def table_by_context(lines: list[Line]) -> str:
    """Build a table with a row per model and length of the prompt, and how many times a new prompt's speed each has."""
    runs: dict[tuple[str, int], dict[str, Line]] = {}
    for line in lines:
        if line["measure"] in BY_CONTEXT and line["arm"] == "rekindle":
            key = Path(line["settings"]["model"]).stem, line["settings"]["context"]
            runs.setdefault(key, {})[line["measure"]] = line
    rows = [f"| model | tokens | {' | '.join(BY_CONTEXT)} |", "|---|--:|" + "--:|" * len(BY_CONTEXT)]
    for (model, _), run in runs.items():
        new = run["cold"]["median"]
        times = {name: f", {new / line['median']:,.0f}x" for name, line in run.items() if name != "cold"}
        cells = (f"{shown(run.get(name))}{times.get(name, '')}" for name in BY_CONTEXT)
        rows.append(f"| {model} | {run['cold']['detail']['prompt_tokens']:,} | {' | '.join(cells)} |")
    said = f"Median (lowest-highest), times the speed of cold. {origin(lines[0], ('kv', 'threads', 'repeats'))}."
    return "\n".join([*rows, "", said])


def origin(line: Line, names: tuple[str, ...]) -> str:
    """Say where the figures come from, and with which settings."""
    versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items() if name != "rekindle")
    machine = f"{line['machine']['processor']}, {line['machine']['cores']} cores"
    known = {**line["settings"], **line["settings"].get("about", {}), **line["detail"]}
    settings = ", ".join(f"{name} {known[name]}" for name in names)
    return f"{machine}; {versions}; {settings}; {line['date']}, commit {line['commit'][:12]}"


def main() -> None:
    """Replace the text between the markers on every page that has them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("lines", type=Path)
    parser.add_argument("--table", help="the name in the marker [the bench of the lines]")
    parser.add_argument("--by", choices=("arm", "context"), default="arm", help="what a column, or a row, is of")
    given = parser.parse_args()
    lines = [json.loads(text) for text in given.lines.read_text("utf-8").splitlines()]
    begin = f"<!-- measured: {given.table or lines[0]['bench']} -->"
    built = table(lines) if given.by == "arm" else table_by_context(lines)
    written = 0
    for page in PAGES:
        before, found, rest = page.read_text("utf-8").partition(begin)
        _, ended, after = rest.partition(END)
        if found and ended:
            page.write_text(f"{before}{begin}\n{built}\n{END}{after}", "utf-8")
            written += 1
    if not written:
        parser.error(f"no page has {begin} with {END} after it")


if __name__ == "__main__":
    main()
