"""rekindle run: what is listed, played, written and said when it stops; exit codes."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from rekindle.cli import app
from rekindle_sessions.cli.run import Transcript
from rekindle_sessions.cli.stage import Stage
from rekindle_sessions.log.records import SessionRecords
from rekindle_sessions.scenes.scenario import find, load
from rekindle_sessions.service.events import SessionEvent

ROOT = Path(__file__).parents[2]
SMALL = ("--threads", "1", "--hot-bytes", "64MiB")
SCENE = """\
name: pair
title: A pair
about: Two who know one thing.
variables: {times: 1}
sampling: {max_tokens: 8, temperature: 0}
agents:
  - {name: Ada, knows: The copper key is in the attic.}
  - {name: Bo}
phases:
  - name: talk
    say: Where is the copper key?
    rounds: "{{ times }}"
  - name: vote
    decide: {question: 'Where is the copper key?', options: [attic, cellar]}
outcome:
  - text: Over after {{ times }}.
"""


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ("run", *arguments))


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    path = tmp_path / "pair.yaml"
    path.write_text(SCENE)
    return path


def test_without_a_scenario_those_that_are_shipped_are_listed() -> None:
    result = run()
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["committee", "dilemma", "gossip", "router"]
    assert "router     11 agents  Ten experts and a front desk\n" in result.stdout


def test_help_names_the_engines_flags_and_not_the_servers() -> None:
    shown = run("--help").output
    for flag in (
        "--model",
        "--store",
        "--kv",
        "--hot-bytes",
        "--set",
        "--seed",
        "--max-tokens",
        "--transcript",
        "--plain",
    ):
        assert f"{flag} " in shown
    assert "--port" not in shown


def test_a_scene_is_played_and_written(scene: Path, tmp_path: Path) -> None:
    written = tmp_path / "out.md"
    result = run(str(scene), "--plain", "--set", "times=2", "--store", "off", "--transcript", str(written), *SMALL)
    assert result.exit_code == 0, result.output
    shown = result.stdout
    assert shown.startswith("A pair\nTwo who know one thing.\n")
    assert shown.count("\nAda: ") == 2 and shown.count("\nBo: ") == 2
    assert "Ada votes: " in shown and "→ " in shown
    assert "first token after" in shown and "% of " in shown
    assert "Over after 2." in shown and "6 turns," in shown and "median gap" in shown
    assert "\x1b[" not in shown
    text = written.read_text()
    assert text.startswith("# A pair\n\nTwo who know one thing.\n")
    for part in (
        "## talk",
        "**Host**: Where is the copper key?",
        "**Ada**: ",
        "**Bo** votes: ",
        "> ",
        "- Over after 2.",
    ):
        assert part in text


def test_an_invalid_file_is_exit_code_1_without_a_traceback(scene: Path) -> None:
    scene.write_text(SCENE.replace("rounds:", "round:").replace("Bo}", "Bo, age: 3}"))
    result = run(str(scene))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "pair.yaml cannot be played: 2 mistakes" in result.stderr
    assert f"{scene}:8: agents[1].age: is not known here" in result.stderr
    assert f"{scene}:12: phases[0].round: is not known here" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nobody"], "there is no scenario 'nobody': committee, dilemma, gossip, router are shipped"),
        (["no/such.yaml"], "there is no file no/such.yaml"),
        (["gossip", "--set", "thing"], "--set needs NAME=VALUE, not 'thing'"),
        (["gossip", "--set", "colour=red"], "this scenario has no variable 'colour': thing=copper key"),
        (["dilemma", "--set", "days=few"], "days must be a whole number"),
        (["gossip", "--max-tokens", "0"], "max_tokens must be an integer"),
        (["gossip", "--transcript", "/no/such/dir/file.md"], "there is no directory /no/such/dir"),
    ],
    ids=["name", "path", "pair", "variable", "value", "sampling", "transcript"],
)
def test_what_the_caller_has_to_change_is_exit_code_2(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr


def sessions(store: Path) -> list[str]:
    records = SessionRecords.open(store / "sessions.db")
    try:
        return [card.id for card in records.cards()]
    finally:
        records.close()


def test_a_session_goes_when_the_scene_is_over_unless_it_is_kept(scene: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert run(str(scene), "--store", str(store), *SMALL).exit_code == 0
    assert sessions(store) == []
    assert run(str(scene), "--store", str(store), "--keep", *SMALL).exit_code == 0
    assert len(sessions(store)) == 1


def test_an_error_in_the_middle_says_what_is_left(scene: Path, tmp_path: Path) -> None:
    scene.write_text(
        SCENE.replace("  - name: vote\n", "  - name: sum\n    say: '{{ 1 // scores.Ada }}'\n  - name: vote\n")
    )
    store, written = tmp_path / "store", tmp_path / "out.md"
    result = run(str(scene), "--plain", "--store", str(store), "--transcript", str(written), *SMALL)
    assert result.exit_code == 2, result.output
    assert "phases[1].say: the template fails: ZeroDivisionError" in result.stderr
    (left,) = sessions(store)
    assert f"stopped in phase 'sum'. The conversation is saved as session {left}" in result.stdout
    assert f"(DELETE /v1/coordination/sessions/{left})" in result.stdout
    assert "**Bo**: " in written.read_text()
    result = run(str(scene), "--plain", "--store", "off", *SMALL)
    assert "stopped in phase 'sum'; with --store off nothing is kept" in result.stdout


def test_an_interrupt_ends_cleanly_and_says_what_is_left(scene: Path, tmp_path: Path) -> None:
    store, written = tmp_path / "store", tmp_path / "out.md"
    command = [sys.executable, "-m", "rekindle.cli", "run", str(scene), "--plain", "--set", "times=500"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'pocket' / 'src'}", "PYTHONUNBUFFERED": "1"}
    here = signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, a child ignores it, too
    try:
        process = subprocess.Popen(
            [*command, "--store", str(store), "--transcript", str(written), *SMALL],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, here)
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("Bo: "))
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    (left,) = sessions(store)
    assert f"stopped in phase 'talk'. The conversation is saved as session {left}" in rest
    assert "**Bo**: " in written.read_text()


def told(kind: str, **data: object) -> SessionEvent:
    return SessionEvent(kind, data)


def turn(number: int, speaker: str, **more: object) -> SessionEvent:
    return told("turn_start", turn=number, speaker=speaker, to=None, purpose="speak", round=1, **more)


def end(number: int, speaker: str, text: str) -> SessionEvent:
    report = {"prompt_tokens": 100, "reused_tokens": 99}
    figures = {"rekindle": report, "gap_ms": 12.0, "first_token_ms": 34.0, "num_tokens": 3, "taken_in_tokens": 5}
    return told(
        "turn_complete", turn=number, speaker=speaker, text=text, to=None, purpose="speak", cut=False, **figures
    )


def test_turns_that_are_spoken_together_are_shown_one_after_the_other() -> None:
    out = io.StringIO()
    stage = Stage(load(find("committee")), Console(file=out, width=160))
    for event in (
        turn(1, "Alice"),
        turn(2, "Bob"),
        told("token", turn=2, speaker="Bob", text="I [bold] "),
        told("token", turn=1, speaker="Alice", text="It is "),
        told("token", turn=2, speaker="Bob", text="saw it."),
        end(2, "Bob", "I [bold] saw it."),
        told("token", turn=1, speaker="Alice", text="there."),
        end(1, "Alice", "It is there."),
        turn(3, "Carla"),
        told("turn_failed", turn=3, speaker="Carla", error="no room"),
    ):
        stage.show(event)
    said = "  99% of 100 tokens reused, first token after 34 ms, gap 12 ms"
    assert out.getvalue().splitlines() == [
        "Alice: It is there.",
        said,
        "Bob: I [bold] saw it.",
        said,
        "Carla: ",
        "  could not speak: no room",
    ]
    assert stage.totals.summary() == (
        "2 turns, 6 tokens generated; of 200 tokens of prompts 198 reused, 2 computed; "
        "10 prefilled while others spoke; median gap 12 ms"
    )


def test_whispers_votes_and_games_are_told() -> None:
    out = io.StringIO()
    scene = load(find("committee"))
    stage, written = Stage(scene, Console(file=out, width=160)), Transcript(scene)
    question = {"mode": "majority"}
    vote = {"question": question, "outcome": None, "counts": [{"votes": [["a", 1], ["b", 1]]}], "tied": ["a", "b"]}
    moves = {**vote, "question": {"mode": "moves"}, "abstained": ["Bob"]}
    ballots = [{"voter": "Alice", "ranking": ["a"]}, {"voter": "Bob", "ranking": []}]
    for event in (
        told("scene", session="s", layout={"extends": False, "lost_share": 0.25, "why": "it drops thoughts"}),
        told("message", utterance={"by": "Alice", "text": "psst", "to": ["Bob"]}),
        told("message", utterance={"by": "Host", "text": "you two", "to": ["Alice", "Bob"]}),
        told("decision", **vote, abstained=["Carla"], ballots=[]),
        told("decision", **moves, ballots=ballots),
        told("scores", phase="game", round=2, moves={}, points={"Alice": 3}, scores={"Alice": 4.5}),
        told("outcome", verdicts=[{"text": "well", "holds": True, "of": 1}, {"text": "bad", "holds": False, "of": 1}]),
    ):
        stage.show(event)
        written.add(event)
    lines = [
        "Alice (whispers to Bob): psst",
        "Host (to Alice, Bob): you two",
        "→ nothing decided; majority; a 1, b 1; tied: a, b; abstained: Carla",
        "→ moves: Alice: a, Bob: –",
        "→ round 2: Alice +3 = 4.5",
        "✓ well",
        "✗ bad",
    ]
    shown = out.getvalue()
    assert shown.startswith("This model's template does not let prompts only grow (it drops thoughts): 25% of")
    assert [line for line in shown.splitlines() if line in lines] == lines
    text = written.text("the end")
    for part in ("**Alice** (whispers to Bob): psst", "> round 2: Alice +3 = 4.5", "- ✗ bad", "<sub>the end</sub>"):
        assert part in text
