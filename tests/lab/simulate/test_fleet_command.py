"""What `rekindle simulate --replicas` prints, writes and refuses."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rekindle.cli import app
from rekindle.errors import ConfigError
from rekindle_lab.simulate.fleet.fleet import sessions_of
from rekindle_lab.simulate.fleet.report import show_bytes
from rekindle_lab.simulate.fleet.speeds import Speeds
from rekindle_lab.simulate.reading import read_trace
from rekindle_lab.simulate.trace import TraceOptions

PAGE = Path(__file__).parents[3] / "docs" / "fleet.md"
# Two sessions of three blocks of 512 tokens and one more; the first comes again 9 s later.
HASHED = (
    {"timestamp": 0, "input_length": 1536, "hash_ids": [7, 8, 9]},
    {"timestamp": 1000, "input_length": 1536, "hash_ids": [1, 2, 3]},
    {"timestamp": 9000, "input_length": 2048, "hash_ids": [7, 8, 9, 4]},
    {"timestamp": 9500, "input_length": 512, "hash_ids": [5]},
)
TURNS = (
    [{"role": "user", "content": "When did the mill burn down?"}],
    [{"role": "user", "content": "Who keeps the archive of the small town?"}],
)


def write(path: Path, lines: Any = HASHED) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def row(output: str, arm: str) -> list[str]:
    """The cells of the one row that begins with `arm`."""
    (found,) = [line for line in output.splitlines() if re.match(rf"\s*{re.escape(arm)}\s\s", line)]
    return re.split(r"\s\s+", found.strip())[1:]


def test_the_command_shows_shares_waits_load_and_traffic(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.jsonl"
    result = command(
        *(write(tmp_path / "t.jsonl"), "--replicas", 1, "--capacities", "unlimited", "--tier", "none,unlimited"),
        *("--kill", 0.5, "--back", "1s", "--prefill", 512, "--token-bytes", 1e6, "--tier-bandwidth", 1.024),
        *("--tier-latency", 0.1, "--out", out),
    )
    assert result.exit_code == 0, result.output
    assert "1 replica, hot memory of 8 blocks (4.1k tokens) in all, 8 each" in result.output
    assert "one dies after 50 % of the requests and is back, empty, 1 s later" in result.output
    # Without: three blocks until 3.005 and three until 6.01; four from 10 to 14.005, and one until 15.01.
    waits = [3.005, 5.01, 5.005, 5.51]
    cells = row(result.output, "session")
    assert cells[:6] == ["0.000", "0.000", "0.000", "0.0000", f"{sum(waits) / 4:.2f}", "5.51"]
    assert cells[6:] == [f"{(2.005 + 1 + 4.505) / 4:.2f}", f"{11.02 / 15.01:.2f}", "1.00", "0 of 3"]
    # With: three of four blocks in 0.1 + 1.5 s instead of 3; 8 blocks and 4 heads written, 3 and 4 read.
    cells = row(result.output, "session, tier unlimited")
    assert cells[:4] == ["0.000", "0.273", "0.273", "0.0000"]
    assert cells[10:] == ["12", "4.1 GB", "7", "1.54 GB"]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["measure"] for line in lines[:3]] == ["share of blocks found", "first token, mean", "first token, p99"]
    assert len(lines) == 6 and lines[5]["arm"] == "session, tier unlimited" and lines[5]["unit"] == "s"
    assert lines[2]["median"] == pytest.approx(5.51)
    detail, settings = lines[5]["detail"], lines[5]["settings"]
    assert (detail["num_replicas"], detail["death"]) == (1, {"after": 0.5, "back_s": 1.0})
    assert (detail["blocks_put"], detail["heads_got"], detail["bytes_got"]) == (8, 4, 1.536e9)
    assert (settings["trace"], settings["speeds"]["prefill"]) == ("t", 512)


def test_every_route_and_tier_is_a_row_next_to_one_machine(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl")
    result = command(trace, "--replicas", 2, "--route", "prefix, random", "--tier", "none,3", "--capacities", 8)
    assert result.exit_code == 0, result.output
    for arm in ("random", "prefix", "random, tier 3", "prefix, tier 3"):
        assert len(row(result.output, arm)) == (14 if "tier" in arm else 10)
    assert row(result.output, "one machine") == row(result.output, "one machine, tier 3") == ["0.273", "0.000", "0.273"]
    assert row(result.output, "prefix")[:3] == ["0.273", "0.000", "0.273"]
    both = command(trace, "--replicas", 2, "--capacities", "4,8")
    assert both.output.count("2 replicas, hot memory of") == 2 and "2 each" in both.output


def test_a_fleet_has_a_size_and_a_route_by_default(tmp_path: Path) -> None:
    result = command(write(tmp_path / "t.jsonl"), "--replicas", 2)
    assert result.exit_code == 0, result.output
    assert "hot memory of 2 blocks (1.02k tokens) in all, 1 each\n" in result.output
    assert len(row(result.output, "session")) == 10 and "tier unlimited" not in result.output


def test_arrivals_are_raised_until_queues_form(tmp_path: Path) -> None:
    trace, out = write(tmp_path / "t.jsonl"), tmp_path / "out.jsonl"
    arguments = ("--replicas", 1, "--prefill", 512, "--capacities", 8, "--saturate")
    result = command(trace, *arguments, "7s", "--out", out)
    assert result.exit_code == 0, result.output
    assert "the most arrivals with which 99 % of the requests wait 7 s at most" in result.output
    (best,) = [line for line in result.output.splitlines() if "◀" in line and "Waits" not in line]
    factor = best.split()[1]
    assert float(factor) > 2 and row(result.output, f"session, arrivals × {factor}")[5] in best
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    borne = [line for line in lines if line["detail"]["is_most_borne"]]
    assert len(borne) == 3 and len(lines) > 9
    assert borne[2]["median"] <= 7 and f"{borne[2]['detail']['arrivals']:.3g}" == factor
    assert "above the bound with the fewest arrivals" in command(trace, *arguments, "1s").output
    assert "within the bound with the most arrivals" in command(trace, *arguments, "1h").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--replicas", "0"], "--replicas must be 1 at least, not 0"),
        (
            ["--replicas", "2", "--route", "sticky"],
            "no route is called 'sticky': choose of random, queue, session, prefix",
        ),
        (["--replicas", "2", "--tier", "big"], "'big' is no capacity"),
        (["--replicas", "9", "--capacities", "8"], "8 blocks are less than one for each of 9 replicas"),
        (["--replicas", "2", "--arrivals", "0"], "--arrivals must be a number above 0, not 0"),
        (["--replicas", "2", "--arrivals", "nan"], "--arrivals must be a number above 0, not nan"),
        (["--replicas", "2", "--saturate", "0s"], "--saturate must be above 0"),
        (["--replicas", "2", "--saturate", "soon"], "not a duration"),
        (["--replicas", "2", "--kill", "1"], "--kill is a share of the requests, from 0 up to but not 1, not 1"),
        (["--replicas", "1", "--kill", "0.5"], "--kill leaves no replica: set --replicas 2 or more, or --back"),
        (["--replicas", "2", "--back", "60s"], "--back needs --kill"),
        (["--replicas", "2", "--tier-latency", "1"], "--tier-latency needs --tier"),
        (
            ["--replicas", "2", "--tier", "8", "--tier-latency", "-1"],
            "--tier-latency must be a number 0 or more, not -1",
        ),
        (["--replicas", "2", "--tier", "none", "--token-bytes", "9"], "--token-bytes needs --tier"),
        (["--replicas", "2", "--prefill", "0"], "--prefill must be a number above 0, not 0"),
        (["--replicas", "2", "--tier", "8", "--tier-bandwidth", "inf"], "--tier-bandwidth must be a number above 0"),
        (["--replicas", "2", "--ttl", "60s"], "--ttl cannot be combined with --replicas"),
        (["--replicas", "2", "--disk", "8"], "--disk cannot be combined with --replicas"),
        (["--replicas", "2", "--order", "free"], "--order cannot be combined with --replicas"),
        (["--replicas", "2", "--plot", "x.png"], "--plot cannot be combined with --replicas"),
        (["--route", "session"], "--route needs --replicas"),
        (["--prefill", "5"], "--prefill needs --replicas"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = command(write(tmp_path / "t.jsonl"), *arguments)
    assert result.exit_code == 2 and said in " ".join(result.output.split()), result.output


def test_traces_without_times_or_blocks_are_refused(tmp_path: Path) -> None:
    untimed = write(tmp_path / "log.jsonl", [{"messages": turn} for turn in TURNS])
    result = command(untimed, "--replicas", 2)
    assert result.exit_code == 2 and "does not say when its requests came" in result.output
    empty = write(tmp_path / "t.jsonl", [{"timestamp": 0, "input_length": 0, "hash_ids": []}])
    result = command(empty, "--replicas", 2)
    assert result.exit_code == 2 and "has no blocks of 512 tokens" in result.output
    at_once = write(tmp_path / "t.jsonl", [{**line, "timestamp": 5} for line in HASHED])
    result = command(at_once, "--replicas", 2, "--saturate", "1s")
    assert result.exit_code == 2 and "come at once: --saturate has no meaning" in result.output
    assert command(at_once, "--replicas", 2, "--capacities", 8).exit_code == 0


def test_where_nothing_can_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl")
    result = command(trace, "--replicas", 2, "--out", trace / "x.jsonl")
    assert result.exit_code == 2 and "cannot be written" in result.output and "requests in" not in result.output


def test_a_log_names_its_sessions(tmp_path: Path) -> None:
    first, second = TURNS
    third = [*first, {"role": "assistant", "content": "In 1874."}, {"role": "user", "content": "Who lit it?"}]
    path = write(tmp_path / "log.jsonl", [{"messages": messages} for messages in (first, second, third)])
    trace = read_trace(path, TraceOptions(1))
    assert sessions_of(trace) == [0, 1, 0] and all(request.session for request in trace.requests)


def test_speeds_and_bytes_have_units() -> None:
    speeds = Speeds()
    assert speeds.compute_s(40_000) == 2.0
    assert speeds.load_s(30_000) == pytest.approx(0.03 + 30_000 * 35_840 / 9.3e9)
    assert speeds.load_s(0) == 0 and not speeds.is_load_faster(0)
    assert [speeds.is_load_faster(tokens) for tokens in (512, 1024)] == [False, True]
    with pytest.raises(ConfigError, match="--token-bytes"):
        Speeds(token_bytes=0)
    assert [show_bytes(count) for count in (0, 999, 18_350_080, 7.65e11, 4e15)] == [
        "0 B",
        "999 B",
        "18.4 MB",
        "765 GB",
        "4 PB",
    ]


def test_the_example_of_the_page_prints_what_stands_there(tmp_path: Path) -> None:
    page = PAGE.read_text()
    part = page[page.index("## Simulated") :]
    (lines,) = re.findall(r"```json\n(.*?)```", part, re.DOTALL)
    asked, said = (re.findall(rf"```{language}\n(.*?)```", part, re.DOTALL)[0] for language in ("bash", "text"))
    (tmp_path / "trace.jsonl").write_text(lines)
    program, *arguments = shlex.split(asked)
    assert program == "rekindle"
    with chdir(tmp_path):
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    printed = [line.rstrip() for line in result.output.splitlines() if line.strip()]
    assert printed == [line.rstrip() for line in said.splitlines() if line.strip()]
