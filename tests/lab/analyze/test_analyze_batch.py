"""`rekindle analyze` on batches of prompts: what is read as one, where prompts end, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from rekindle.cli import app
from rekindle.errors import ConfigError
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.analyze.promptfile import holds_prompts, read_prompts
from rekindle_pocket import MODEL_DIR

SYSTEM = "You are a helpful assistant."
PROMPTS = [
    f"{SYSTEM} Use the calendar tool. What is on today?",
    f"{SYSTEM} Use the weather tool. Will it rain?",
    f"{SYSTEM} Tell a story.",
    f"{SYSTEM} Tell a story.",
    "Write a poem.",
]


def write(path: Path, text: str) -> Path:
    file = path / "prompts.txt"
    file.write_bytes(text.encode())
    return file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Dear diary\n", True),
        ("[INST] Hello! [/INST]\n[INST] Bye! [/INST]\n", True),
        ('"Hello", she said.\n', True),
        ("\n\n  Hello\n", True),
        ("17\n18\n", True),
        ("\ufeffHello\n", True),
        ('{"messages": []}\n', False),
        ('\ufeff{"messages": []}\n', False),
        ('"Quoted."\nNot quoted.\n', True),
        ('"All"\n"quoted."\n', True),
        ("[1] first rule\n[2] second rule\n", True),
        ("[] a task\n[] another\n", True),
        ('{"a": 1} is JSON: explain it.\nTell a story.\n', True),
        ('{"a": 1}\nExplain the line above.\n', True),
        ("Hello\n" * 60 + '{"messages": []}\n' * 40, True),
        ("Hello\n" * 40 + '{"messages": []}\n' * 60, False),
        ("{name}, write a poem.\n", True),
        ('torn"}\n{"messages": []}\n{"messages": []}\n', False),
        ('{"messages": [\n  {"role": "user",\n', False),
        ('[{"messages": []}, {"messages": []}]\n', False),
        ('{\n "log": {\n  "entries": []\n }\n}\n', False),
        ("[\n" + ' {"a": 1},\n' * 200, False),
        ("[" * 100_000, False),
        ('["Write a poem.", "Tell a story."]\n', False),
        ('[\n {"a": 1},\n', False),
        ("{\n", False),
        ("[[[", False),
        ("[]", False),
        ('"{}"\n', False),
        ("", False),
        (" \n\n", False),
    ],
)
def test_text_is_told_from_json_by_what_it_holds(tmp_path: Path, text: str, expected: bool) -> None:
    assert holds_prompts(write(tmp_path, text)) is expected


def test_what_cannot_be_read_holds_no_prompts(tmp_path: Path) -> None:
    assert not holds_prompts(tmp_path) and not holds_prompts(tmp_path / "none.txt")
    for path in (tmp_path, tmp_path / "none.txt"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_prompts(path, None)


def texts(path: Path, separator: str | None) -> list[tuple[str, str]]:
    return [(prompt.place, prompt.text) for prompt in read_prompts(path, separator)]


def test_a_prompt_ends_with_its_line_or_at_the_separator(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeffone \r\n\r\n two\n---\nthree\n\n---\n")
    assert texts(path, None) == [
        ("line 1", "one "),
        ("line 3", " two"),
        ("line 4", "---"),
        ("line 5", "three"),
        ("line 7", "---"),
    ]
    assert texts(path, "---") == [("prompt 1", "one \r\n\r\n two"), ("prompt 2", "three")]
    assert texts(path, r"\n---\n") == texts(path, "---")
    assert texts(write(tmp_path, "a\0b\0"), r"\0") == [("prompt 1", "a"), ("prompt 2", "b")]


def test_what_cannot_stand_in_a_prompt_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"bad \xff byte\nmark \xef\xb7\x90\n")
    assert [text for _, text in texts(path, None)] == ["bad \ufffd byte", "mark \ufffd"]


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "140"}).invoke(app, ["analyze", *map(str, arguments)])


def test_the_command_says_what_a_batch_shares(tmp_path: Path) -> None:
    path, out, plot = write(tmp_path, "\n".join(PROMPTS) + "\n"), tmp_path / "out.json", tmp_path / "out.png"
    result = run(path, "--out", out, "--plot", plot, "--rows", 2)
    assert result.exit_code == 0, result.output
    for part in ("read as a batch of prompts, one a line", "5 prompts,", "1 of them repeat", "line 3 comes most often"):
        assert part in result.output
    assert "the first 2 of 3" in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = json.loads(out.read_text())
    encoder = PromptEncoder.from_dir(MODEL_DIR)
    ids = [encoder.encode(encoder.render_text(text)).tolist() for text in PROMPTS]
    prefixes = {tuple(each[: end + 1]) for each in ids for end in range(len(each))}
    assert (report["total_tokens"], report["distinct_tokens"]) == (sum(map(len, ids)), len(prefixes))
    assert sum(each["saved_tokens"] for each in report["shared"]) == report["saved_tokens"]
    assert report["identical"] == [["line 3", "line 4"]]
    first = report["shared"][0]
    assert (first["prompts"], first["ends_with"], first["first"]) == (4, SYSTEM, "line 1")
    system = encoder.encode(encoder.render_text(SYSTEM))
    assert first["tokens"] == len(system) and np.array_equal(ids[0][: len(system)], system)
    story = next(each for each in report["shared"] if each["ends_with"].endswith("Tell a story."))
    assert (story["tokens"], story["stretch_tokens"], story["prompts"]) == (len(ids[2]), len(ids[2]) - len(system), 2)


def test_short_beginnings_can_be_left_out(tmp_path: Path) -> None:
    path, out = write(tmp_path, "\n".join(PROMPTS)), tmp_path / "out.json"
    assert run(path, "--out", out, "--min-length", 1000).exit_code == 0
    report = json.loads(out.read_text())
    assert report["shared"] == [] and report["deduplication"] == 0 and report["identical"] == [["line 3", "line 4"]]


def test_what_a_terminal_would_obey_is_shown_escaped(tmp_path: Path) -> None:
    start = "Red \x1b[31m and \u202eback\u202c,\u3000wide \u00e9"
    path, out = write(tmp_path, f"{start} one\n{start} two\n"), tmp_path / "out.json"
    result = run(path, "--out", out)
    assert result.exit_code == 0 and "\x1b" not in result.output and "\u202e" not in result.output
    (shared,) = json.loads(out.read_text())["shared"]
    assert shared["ends_with"].startswith(r"Red \x1b[31m and \u202eback\u202c," + "\u3000wide \u00e9")


def test_a_separator_makes_prompts_of_any_file(tmp_path: Path) -> None:
    path = write(tmp_path, '{"task": 1}\n\n{"task": 2}\n')
    refused = run(path)
    assert refused.exit_code == 2 and "--separator" in refused.output
    result = run(path, "--separator", r"\n\n")
    assert result.exit_code == 0 and "2 prompts," in result.output and r"parted by \n\n" in result.output


def test_a_log_is_said_to_be_one(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"messages": [{"role": "user", "content": "Hello."}]}))
    result = run(path)
    assert result.exit_code == 0 and "read as a log of requests" in result.output


def test_what_the_caller_has_to_change_ends_with_2(tmp_path: Path) -> None:
    assert run(write(tmp_path, " \n")).exit_code == 2
    nothing = run(write(tmp_path, " \n"), "--separator", "x")
    assert nothing.exit_code == 2 and "holds no prompt" in nothing.output
    empty = run(write(tmp_path, "a"), "--separator", "")
    assert empty.exit_code == 2 and "--separator is empty" in empty.output
