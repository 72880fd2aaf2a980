"""why: what a running server knows of an agent's last requests, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import get_args

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rekindle.cli import app
from rekindle.cli.why import marked, request_lines
from rekindle.config import ServerSettings
from rekindle.harness.client import free_port
from rekindle.matching.explain import Cause
from rekindle.server.answers.advice import ADVICE, advice_for
from tests.forks import ForkedServer

SYSTEM = (
    "You are a helper of the harbour office and know all of its rules by heart. It is {day} morning, 2026-11-{date}."
)
KEY = {"REKINDLE_API_KEY": "k"}


def run(*arguments: str, **env: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", **KEY, **env}).invoke(app, ["why", *arguments])


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("why")
    flags = ["--store", str(folder / "store"), "--hot-bytes", "64MiB", "--threads", "1"]
    with ForkedServer(flags, log=folder / "log", server=ServerSettings(port=0, api_key="k")) as server:
        client = server.wait_ready()
        for number, text in enumerate((SYSTEM.format(day="Monday", date=16), SYSTEM.format(day="Tuesday", date=17))):
            messages = [{"role": "system", "content": text}, {"role": "user", "content": "Where is the key of Bob?"}]
            client.chat(messages, agent="ada/1", max_tokens=4)
            if not number:
                client.chat(messages, agent="bo", max_tokens=4)
        yield str(server.port)


def test_the_first_difference_its_cause_and_what_to_do(port: str) -> None:
    result = run("ada/1", REKINDLE_PORT=port)
    assert result.exit_code == 0, result.output
    newest, first = result.output.split("\n\n")
    assert "first difference in message 0" in newest
    stored = next(line for line in newest.splitlines() if line.lstrip().startswith("stored"))
    sent = next(line for line in newest.splitlines() if line.lstrip().startswith("sent"))
    assert "It is [[Monday]] morning" in stored and "It is [[Tuesday]] morning" in sent
    assert "date" in next(line for line in newest.splitlines() if "likely cause" in line)
    assert ADVICE["date_line"] in newest
    assert "first token after" in newest and "prefill" in newest
    assert "reused 0 of" in first and ADVICE["not_stored"] in first


def test_what_was_reused_is_said_with_its_tier(port: str) -> None:
    asked = json.loads(run("bo", "--json", "--url", f"http://127.0.0.1:{port}/v1").stdout)["data"]
    assert [request["source"] for request in asked] == ["shared"]
    said = run("bo", REKINDLE_PORT=port).output
    assert f"reused {asked[0]['reused_tokens']} of {asked[0]['prompt_tokens']} tokens" in said
    assert f"{asked[0]['hot_tokens']} hot, 0 warm, of other agents" in said


def test_an_unknown_agent_names_near_ones(port: str) -> None:
    result = run("ada1", REKINDLE_PORT=port)
    assert (result.exit_code, "did you mean ada/1?" in result.output) == (2, True), result.output
    assert "rekindle agents lists them" in run("zzz", REKINDLE_PORT=port).output


def test_no_server(port: str) -> None:
    nobody = str(free_port())
    result = run("ada/1", REKINDLE_PORT=nobody)
    assert result.exit_code == 1
    assert f"http://127.0.0.1:{nobody}" in result.output and "rekindle serve" in result.output


def test_a_wrong_key_and_a_wrong_url_are_the_callers(port: str) -> None:
    result = run("ada/1", REKINDLE_PORT=port, REKINDLE_API_KEY="other")
    assert (result.exit_code, "REKINDLE_API_KEY" in result.output) == (2, True)
    result = run("ada/1", "--url", "localhost:1")
    assert (result.exit_code, "http://host:port" in result.output) == (2, True)


def test_every_cause_has_its_advice() -> None:
    causes = {name for kind in get_args(Cause) for name in (get_args(kind) or (kind,))}
    assert set(ADVICE) == causes
    assert advice_for({"cause": "date_line", "offer": None}) == ADVICE["date_line"]
    offer = {"setting": "tail_heading", "value": "My build:", "reason": "it changes"}
    assert advice_for({"cause": "date_line", "offer": offer}) == "serve with --tail-heading 'My build:': it changes"


@pytest.mark.parametrize(
    ("stored", "sent", "wanted"),
    [
        ("a Monday, b", "a Tuesday, c", ("a [[Monday]], b", "a [[Tuesday]], c")),
        ("same", "same and more", ("same[[]]", "same[[ and more]]")),
        ("one, two", "one two", ("one[[,]] two", "one[[]] two")),
        ("one\ntwo", "one\nsix", ("one⏎[[two]]", "one⏎[[six]]")),
        ("\x1b[31m", "", ("\\x1b[31m", "")),
    ],
)
def test_the_difference_is_marked(stored: str, sent: str, wanted: tuple[str, str]) -> None:
    assert marked(stored, sent) == wanted


@pytest.mark.parametrize(
    ("item", "line"),
    [
        (
            {"kind": "attribution", "message_index": 0, "text": "x-billing: 7", "tokens": 12_345},
            "  left out the attribution line of message 0: x-billing: 7 (as sent it would have cost 12,345 tokens)",
        ),
        (
            {"kind": "tools", "message_index": None, "text": "b, a", "tokens": 0},
            "  put the tools in order: b, a (this time it cost nothing)",
        ),
    ],
)
def test_what_was_normalised_is_said_with_what_it_would_have_cost(item: dict[str, object], line: str) -> None:
    request = {
        "at": 0.0, "error": None, "outcome": "extend", "finish_reason": "stop", "source": "parent", "reuse": None,
        "prompt_tokens": 9, "reused_tokens": 8, "hot_tokens": 8, "warm_tokens": 0, "computed_tokens": 1,
        "completion_tokens": 1, "timings": {}, "explanation": None, "normalised": [item],
    }  # fmt: skip
    lines = list(request_lines(request, 1.0))
    assert lines[-1] == line
    assert lines[1] == "  reused 8 of 9 tokens: 8 hot, 0 warm, of its parent"
    assert (
        list(request_lines({name: value for name, value in request.items() if name != "normalised"}, 1.0)) == lines[:-1]
    )
