"""A history that begins anew with a summary is computed before it is sent, in the form its client used last time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle.engine.memory.summaries import MOST_AGENTS, Summaries
from rekindle.engine.types import GenerationRequest, Report
from rekindle.model.params import SamplingParams
from rekindle.text.messages import Message, normalise_messages
from tests.engine.idle import until_idle
from tests.engine.test_clients_habits import LOOK, RESULT, ask, called, engine_of, system, user
from tests.server.scripted import write_scripted_model
from tests.tiny_models import tiny_tokenizer

LEAD = "talk of this. It goes on from an earlier conversation, of which a summary follows, and nothing else is known: "
SYSTEM = Message("system", "You are kind.")
TASK, REPLY, MORE = Message("user", "Find it."), Message("assistant", "Where?"), Message("user", "In the attic.")
ASKED = Message("user", "Summarise.")
HISTORY = [SYSTEM, TASK, REPLY, MORE, ASKED]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted") / "model")


def summarised(engine: Engine, history: list[dict[str, Any]], word: str) -> str:
    """A summary that says a word 200 times."""
    token = tiny_tokenizer().get_vocab()[f"Ġ{word}"]
    params = SamplingParams(temperature=0.0, min_tokens=200, max_tokens=200, logit_bias=((token, 100.0),))
    messages = normalise_messages([*history, user("talk and summarise")])
    result = engine.submit(GenerationRequest(messages=messages, agent="ada", params=params, structured=True)).result()
    assert [each.kind for each in result.report.normalised] == ["compaction"] and result.text == f" {word}" * 200
    until_idle(engine)
    return result.text


def begun(engine: Engine, first: str, word: str) -> tuple[Report, str]:
    """A conversation that begins with these words and ends with a summary: the first request, and the summary."""
    history = [system(), user(first)]
    report = ask(engine, *history).report
    history += [called(LOOK), RESULT]
    ask(engine, *history)
    return report, summarised(engine, [*history, {"role": "assistant", "content": "It is in the attic."}], word)


def num_tokens(engine: Engine, text: str) -> int:
    return len(engine.encoder.encode(engine.encoder.render_text(text)))


@pytest.mark.parametrize("anticipate", ["on", "off"])
def test_the_second_summary_is_computed_before_it_is_sent_back(model: Path, tmp_path: Path, anticipate: str) -> None:
    with engine_of(model, tmp_path / "store", anticipate=anticipate, min_reuse_tokens=1) as engine:
        _, summary = begun(engine, "look please", "rain")
        first, summary = begun(engine, f"{LEAD}{summary.strip()}\n\nlook again", "box")
        second = ask(engine, system(), user(f"{LEAD}{summary.strip()}\n\ntalk again")).report
        rest = num_tokens(engine, "\n\ntalk again<|im_end|>\n<|im_start|><|talk|>")
        lead, text = num_tokens(engine, LEAD), num_tokens(engine, summary)
    assert first.computed_tokens >= lead + text, "the first time nothing of it is known"
    if anticipate == "on":
        assert second.computed_tokens <= rest + 16
    else:
        assert second.computed_tokens >= text + rest - 8


def put(summaries: Summaries, *messages: Message, summary: str = "It is there.", agent: str = "ada") -> None:
    summaries.check()
    summaries.asked("a", agent, HISTORY, summary)
    summaries.began("a", agent, messages)


def after(summaries: Summaries, summary: str = "It is not.", agent: str = "ada") -> list[Message] | None:
    summaries.check()
    return summaries.next_history("a", agent, HISTORY, summary)


def test_words_before_a_summary_and_messages_that_are_kept() -> None:
    summaries = Summaries()
    assert after(summaries) is None
    put(summaries, SYSTEM, Message("user", "Summary:\nIt is there.\nGo on."))
    assert after(summaries) == [SYSTEM, Message("user", "Summary:\nIt is not.")]
    assert after(summaries, agent="eve") is None and summaries.next_history("b", "ada", HISTORY, "x") is None
    put(summaries, SYSTEM, TASK, MORE, Message("user", "It is there."), Message("user", "Go on."))
    assert after(summaries) == [SYSTEM, TASK, MORE, Message("user", "It is not.")]
    marked = "<analysis>Hm.</analysis>\n<summary>\nIt is there.\n</summary>"
    put(summaries, SYSTEM, Message("user", "So far: It is there."), summary=marked)
    assert after(summaries, "<summary>Gone.</summary>") == [SYSTEM, Message("user", "So far: Gone.")]
    assert after(summaries, "Without marks.") is None
    summaries.drop("a", "ada")
    assert after(summaries, marked) is None


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, Message("user", "Something else.")],
        [SYSTEM, Message("user", "Unknown."), Message("user", "It is there.")],
        [*HISTORY[:-1], Message("assistant", "It is there."), Message("user", "It is there.")],
        [SYSTEM, Message("assistant", "It is there.")],
    ],
)
def test_other_histories_are_no_form_and_end_the_one_that_was_known(messages: list[Message]) -> None:
    summaries = Summaries()
    put(summaries, SYSTEM, Message("user", "It is there."))
    assert after(summaries) is not None
    put(summaries, *messages)
    assert after(summaries) is None
    summaries.began("a", "ada", [SYSTEM, Message("user", "It is there.")])
    assert after(summaries) is None, "a summary is looked for once"


def test_many_agents_push_out_the_oldest() -> None:
    summaries = Summaries()
    for number in range(MOST_AGENTS + 1):
        put(summaries, SYSTEM, Message("user", "It is there."), agent=f"agent {number}")
    assert after(summaries, agent="agent 0") is None and after(summaries, agent="agent 1") is not None
    for number in range(MOST_AGENTS + 1):
        summaries.asked("b", f"agent {number}", HISTORY, "It is there.")
    summaries.check()
