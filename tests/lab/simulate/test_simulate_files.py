"""What `rekindle simulate` reads, refuses and prints."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rekindle.cli import app
from rekindle.errors import ConfigError
from rekindle.server.dayfile import DayWriter, Header, RecordedRequest
from rekindle_lab.analyze.analysis import Analyser
from rekindle_lab.analyze.logfile import open_log
from rekindle_lab.simulate.capacities import parse_capacities, parse_capacity, show_capacity, show_tokens
from rekindle_lab.simulate.reading import read_trace
from rekindle_lab.simulate.simulation import Memory, simulate
from rekindle_lab.simulate.trace import Trace, TraceOptions
from rekindle_pocket import MODEL_DIR

PAGE = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text()
HASHED = (
    {"timestamp": 0, "input_length": 1500, "output_length": 9, "hash_ids": [7, 8, 9]},
    {"timestamp": 2500, "input_length": 1100, "output_length": 9, "hash_ids": [7, 8, 4]},
    {"timestamp": 9000, "input_length": 1500, "output_length": 9, "hash_ids": [7, 8, 9]},
)
SYSTEM = "You keep the archive of a small town and answer in one sentence. " * 8
REPLIES = ("The mill burned down in 1874, says the second ledger.", "Nobody knows, the page is missing from the book.")


def write(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def hashed(path: Path, lines: Sequence[Any] = HASHED, block_tokens: int | None = None) -> Trace:
    return read_trace(write(path / "trace.jsonl", lines), TraceOptions(block_tokens))


def talk() -> list[list[dict[str, str]]]:
    """The messages of three turns."""
    first = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "When did the mill burn down?"}]
    second = [*first, {"role": "assistant", "content": REPLIES[0]}, {"role": "user", "content": "Who lit it?"}]
    third = [*second, {"role": "assistant", "content": REPLIES[1]}, {"role": "user", "content": "Thank you."}]
    return [first, second, third]


def day(path: Path) -> Path:
    """The talk as our own server records it; the last request came half an hour later."""
    with DayWriter(path, Header(1.7e9, "pocket")) as writer:
        for at_s, messages, reply in zip((0.0, 20.0, 1800.0), talk(), (*REPLIES, "Gladly, come again."), strict=True):
            answer = {"role": "assistant", "content": reply}
            writer.request(RecordedRequest(at_s, {"messages": messages}, answer, agent="archive"))
    return path


def command(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_mooncakes_format_is_read(tmp_path: Path) -> None:
    trace = hashed(tmp_path)
    assert (trace.name, trace.block_tokens, len(trace.blocks), trace.num_tokens) == ("trace", 512, 4, 4100)
    assert [request.at_s for request in trace.requests] == [0.0, 2.5, 9.0]
    assert simulate(trace, Memory(4)).counts("tokens") == (4100, 1024 + 1500, 0)


def test_the_size_of_blocks_is_found_or_given(tmp_path: Path) -> None:
    small = [{"timestamp": 1.5, "input_length": 33, "hash_ids": ["x", "y", "z"]}]
    assert hashed(tmp_path, small).block_tokens == 16
    assert hashed(tmp_path, small, 15).block_tokens == 15
    with pytest.raises(ConfigError, match="33 tokens has 3 hashes, in blocks of 512 tokens it would have 1"):
        hashed(tmp_path, small, 512)
    with pytest.raises(ConfigError, match="--block-tokens"):
        hashed(tmp_path, [*small, *HASHED])


@pytest.mark.parametrize(
    "line",
    [
        {"timestamp": 0, "input_length": 512},
        {"timestamp": 0, "input_length": 512, "hash_ids": [[1]]},
        {"timestamp": 0, "input_length": "512", "hash_ids": [1]},
        {"timestamp": float("nan"), "input_length": 512, "hash_ids": [1]},
        {"timestamp": 10**400, "input_length": 512, "hash_ids": [1]},
        {"timestamp": "noon", "input_length": 512, "hash_ids": [1]},
        [],
        "hash_ids",
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: Any) -> None:
    with pytest.raises(ConfigError, match="line 4"):
        hashed(tmp_path, [*HASHED, line])


def test_a_recorded_day_is_rendered_encoded_and_knows_replies(tmp_path: Path) -> None:
    trace = read_trace(day(tmp_path / "day.jsonl"), TraceOptions(1))
    assert trace.is_timed and [request.at_s for request in trace.requests] == [0.0, 20.0, 1800.0]
    first, second, third = trace.requests
    assert second.blocks[: len(first.stored)] == first.stored and len(first.stored) > len(first.blocks) + 10
    assert third.blocks[: len(second.stored)] == second.stored
    assert len(third.stored) > len(third.blocks), "the last reply is stored, too"
    unlimited = simulate(trace, Memory(len(trace.blocks)))
    assert unlimited.hot_tokens == len(first.stored) + len(second.stored)
    forgetful = simulate(trace, Memory(len(trace.blocks), ttl_s=600))
    assert forgetful.hot_tokens == len(first.stored)


def test_a_log_without_limits_reuses_what_analyze_says(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [{"messages": messages} for messages in talk()])
    trace = read_trace(path, TraceOptions(1))
    total = Analyser(open_log(path), MODEL_DIR).run().total
    found = simulate(trace, Memory(len(trace.blocks)))
    assert found.counts("tokens")[:2] == (total.prompt_tokens, total.reused_tokens)
    assert total.reused_tokens > 0.5 * total.prompt_tokens


def test_what_of_a_log_is_left_out_is_said(tmp_path: Path) -> None:
    bodies = [{"messages": messages} for messages in talk()]
    lost = {"model": "pocket", "input": "And then?", "previous_response_id": "resp_1"}
    path = write(tmp_path / "log.jsonl", [*bodies, {"hello": 1}, lost, {"level": "info"}])
    result = command(path, "--capacities", "unlimited")
    assert result.exit_code == 0 and "3 requests ask for" in result.output, result.output
    assert "2 left out: no request with a prompt in it (first: line 4)" in result.output
    assert "1 left out: it continues response" in result.output
    result = command(write(tmp_path / "lost.jsonl", [lost]))
    assert result.exit_code == 2 and "no request can be rendered as pocket would" in result.output


def test_blocks_of_a_log_are_whole_ones(tmp_path: Path) -> None:
    path = day(tmp_path / "day.jsonl")
    fine, coarse = read_trace(path, TraceOptions(1)), read_trace(path, TraceOptions())
    assert coarse.block_tokens == 64
    assert [len(request.blocks) for request in coarse.requests] == [len(each.blocks) // 64 for each in fine.requests]
    assert coarse.num_tokens == fine.num_tokens


def test_capacities_are_blocks_tokens_or_shares(tmp_path: Path) -> None:
    trace = hashed(tmp_path)
    assert [parse_capacity(text, trace) for text in ("3", "1k", "1025", "0.5k", "50%", "1%", "unlimited")] == [
        3,
        2,
        1025,
        1,
        2,
        1,
        4,
    ]
    assert parse_capacities(["unlimited", "2", "50%"], trace) == [2, 4]
    assert [show_capacity(blocks, trace) for blocks in (3, 4, 5000)] == ["3", "unlimited", "unlimited"]
    assert [show_tokens(count) for count in (7, 512_000, 5_120_000, 22_489_088)] == ["7", "512k", "5.12M", "22.5M"]
    for text in ("", "many", "-3", "1.5", "10X", "0", "0%", "9" * 5000, "9" * 400 + "k", "9" * 400 + "%"):
        with pytest.raises(ConfigError):
            parse_capacity(text, trace)


def test_the_command_prints_both_shares_and_writes_lines_and_a_picture(tmp_path: Path) -> None:
    trace, out, plot = write(tmp_path / "trace.jsonl", HASHED), tmp_path / "new" / "out.jsonl", tmp_path / "plot.png"
    result = command(trace, "--capacities", "2,unlimited", "--ttl", "10s", "--out", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert "3 requests in 9 s ask for 4.1k tokens in 9 blocks of 512, 4 of them different" in result.output
    rows = [line.split() for line in result.output.splitlines() if line.strip().startswith("lru, ttl 10 s")]
    assert [row[-2:] for row in rows] == [["0.444", "0.556"], ["0.500", "0.616"]]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == (1 + 1) * 2 * 2 and {line["bench"] for line in lines} == {"simulate"}
    (line,) = [x for x in lines if x["arm"] == "lru, ttl 10 s" and "tokens" in x["measure"] and x["median"] > 0.6]
    assert (line["detail"]["asked"], line["detail"]["found_hot"]) == (4100, 1024 + 1500)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_command_shows_what_the_disk_adds(tmp_path: Path) -> None:
    trace, plot = write(tmp_path / "t.jsonl", HASHED), tmp_path / "plot.png"
    result = command(trace, "--capacities", "2", "--disk", "4", "--plot", plot)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if line.strip().startswith("lru, disk unlimited")]
    assert [row[-3:] for row in rows] == [["0.444", "+", "0.111"], ["0.500", "+", "0.116"]]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--capacities", "a lot"], "'a lot' is no capacity"),
        (["--ttl", "0s"], "above 0"),
        (["--ttl", "soon"], "not a duration"),
        (["--model", "x/y"], "--model has no meaning"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = command(write(tmp_path / "t.jsonl", HASHED), *arguments)
    assert result.exit_code == 2 and said in result.output


def test_the_commands_own_capacities_fit_a_small_trace(tmp_path: Path) -> None:
    result = command(write(tmp_path / "t.jsonl", HASHED))
    assert result.exit_code == 0, result.output


def test_empty_lines_before_the_first_request_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", HASHED)
    path.write_text("\n  \n" + path.read_text())
    assert len(read_trace(path, TraceOptions()).requests) == 3


def test_a_trace_without_blocks_or_from_a_pipe_is_refused(tmp_path: Path) -> None:
    nothing = write(tmp_path / "t.jsonl", [{"timestamp": 0, "input_length": 0, "hash_ids": []}])
    result = command(nothing, "--capacities", "5")
    assert result.exit_code == 2 and "has no blocks of 512 tokens" in result.output
    reading, writing = os.pipe()
    os.write(writing, write(tmp_path / "u.jsonl", HASHED).read_bytes())
    os.close(writing)
    result = command(f"/dev/fd/{reading}", "--capacities", "2")
    os.close(reading)
    assert result.exit_code == 2 and "is no regular file" in result.output


@pytest.mark.parametrize("option", ["--out", "--plot"])
def test_where_nothing_can_be_written_is_said_before_the_work(tmp_path: Path, option: str) -> None:
    trace = write(tmp_path / "t.jsonl", HASHED)
    result = command(trace, "--capacities", "2", option, trace / "x.png")
    assert result.exit_code == 2 and "cannot be written" in result.output and "Share of" not in result.output
    result = command(tmp_path / "none.jsonl", "--capacities", "2", option, tmp_path / "x.png")
    assert result.exit_code == 2 and not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("name", ["x.pgn", "x"])
def test_a_picture_of_no_known_kind_is_refused_before_the_work(tmp_path: Path, name: str) -> None:
    trace = write(tmp_path / "t.jsonl", HASHED)
    result = command(trace, "--capacities", "2", "--plot", tmp_path / name)
    assert result.exit_code == 2 and "no picture of this kind" in result.output and "Share of" not in result.output
    assert list(tmp_path.iterdir()) == [trace]


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    assert "cannot be read" in command(tmp_path / "none.jsonl").output
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    result = command(empty)
    assert result.exit_code == 2 and "holds no request" in result.output
    without_times = write(tmp_path / "log.jsonl", [{"messages": messages} for messages in talk()])
    result = command(without_times, "--ttl", "5m")
    assert result.exit_code == 2 and "does not say when" in result.output


def blocks_of_the_page(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_example_of_the_page_prints_what_stands_there(tmp_path: Path) -> None:
    (lines,), (said,), (asked,) = (blocks_of_the_page(language) for language in ("json", "text", "bash"))
    (tmp_path / "trace.jsonl").write_text(lines)
    program, *arguments = shlex.split(asked)
    assert program == "rekindle"
    with chdir(tmp_path):
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    printed = [line.rstrip() for line in result.output.splitlines() if line.strip()]
    assert printed[:-2] == [line for line in said.splitlines() if line.strip()]
    assert (tmp_path / "simulated.png").exists()
    assert len((tmp_path / "simulated.jsonl").read_text().splitlines()) == 2 * 3 * 2


def test_the_page_names_every_option() -> None:
    options = set(re.findall(r"--[a-z-]+", CliRunner().invoke(app, ["simulate", "--help"]).output))
    assert options - {"--help", "--revision"} <= set(re.findall(r"--[a-z-]+", PAGE))
