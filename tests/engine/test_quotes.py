"""A history that its client quotes in one message, to have it summarised, is the history that is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.engine.intake.quotes import NOTE, unquoted
from rekindle.engine.memory.histories import Histories
from rekindle.engine.types import Breakpoint, GenerationRequest, Report
from rekindle.text.messages import Message, ToolCall, normalise_messages
from tests.engine.rewriting import with_template
from tests.engine.test_clients_habits import (
    GREEDY,
    PARAMETERS,
    TOOLS,
    VALUE,
    ask,
    called,
    engine_of,
    system,
    user,
)
from tests.server.scripted import TEMPLATE, write_scripted_model

ARGUMENTS = json.dumps(VALUE, separators=(",", ":"), ensure_ascii=False)
LONG = "talk Dust. " + "".join(f"{line}: a line of the long file\n" for line in range(38))
SUMMARISER = {"role": "system", "content": "You write summaries of conversations, in a few words."}
CREATE = "Sum up the tags above. talk"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted") / "model")


def opencode(*parts: str) -> str:
    """The message with which opencode asks for a summary of these parts."""
    quote = "\n".join(parts)
    return f"Here is the conversation so far:\n\n<conversation>\n{quote}\n</conversation>\n\n{CREATE}"


def call(arguments: str = ARGUMENTS) -> str:
    return f"[Assistant tool call]: look({arguments})"


def result(identity: str, text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": identity, "content": text}


HISTORY = [system("\n\ngitStatus: clean"), user("look please"), called(ARGUMENTS), result("c1", LONG)]
ANSWERED = [
    *HISTORY,
    {"role": "assistant", "content": "It is in the attic."},
    user("talk more"),
    {"role": "assistant", "content": "Dust."},
]
QUOTED = [
    "[User]: look please\n",
    "[Assistant]: Let me look.",
    call(),
    f"[Tool result]: {LONG[:1010]}\n[truncated]\n",
    "[Assistant]: It is in the attic.",
]


def test_a_quoted_history_is_read_as_it_was(model: Path, tmp_path: Path) -> None:
    """As opencode asks for a summary, all but the newest messages quoted."""
    with engine_of(model, tmp_path / "store") as engine:
        ask(engine, *HISTORY[:2])
        ask(engine, *HISTORY)
        ask(engine, *ANSWERED, user("talk again"))
        asked = normalise_messages([SUMMARISER, user(opencode(*QUOTED))])
        request = GenerationRequest(
            messages=asked,
            agent="ada",
            params=GREEDY,
            structured=True,
            breakpoints=(Breakpoint(1, len(asked[1].content) - len(" talk"), 300),),
        )
        found = engine.submit(request).result()
        prompt = engine.encoder.decode(found.prompt_ids)
        assert found.report.reused_tokens >= 0.9 * found.report.prompt_tokens, found.report
        kinds = [(each.kind, each.message_index) for each in found.report.normalised if each.kind == "compaction"]
        assert kinds == [("compaction", None), ("compaction", 0), ("compaction", 1)]
        assert prompt.count(PARAMETERS) == len(TOOLS) and prompt.count("37: a line of the long file") == 1
        assert "talk more" not in prompt, "what was not quoted is not in it"
        assert (
            f"{SUMMARISER['content']}\n\nHere is the conversation so far:\n\n<conversation>\n{NOTE}\n</conv" in prompt
        )
        (marked,) = found.report.breakpoint_tokens
        assert engine.encoder.decode(found.prompt_ids[:marked]).endswith("tags above.")

        def as_sent(*messages: Any, agent: str | None = "ada") -> bool:
            report = ask(engine, *messages, tools=None, agent=agent).report
            return not any(each.kind == "compaction" for each in report.normalised)

        assert as_sent(SUMMARISER, user(opencode(*QUOTED)), agent="eve"), "a history belongs to its agent"
        assert as_sent(SUMMARISER, user(opencode(*QUOTED)), agent=None)
        assert as_sent(SUMMARISER, user(opencode(QUOTED[0]))), "no reply is quoted"
        assert as_sent(SUMMARISER, user("talk please"), user(opencode(*QUOTED))), "a quote in a conversation is one"


@pytest.mark.parametrize("drops", [True, False])
def test_reasoning_that_the_template_drops_stays_in_the_quote(model: Path, tmp_path: Path, drops: bool) -> None:
    template = TEMPLATE.replace("{%- if message.reasoning_content", "{%- if false") if drops else TEMPLATE
    copy = with_template(model, template, tmp_path / "copy")
    thoughtful = [*HISTORY[:2], {**HISTORY[2], "reasoning_content": "In a loft?"}, *HISTORY[3:]]
    thought = "[Assistant reasoning]: In a loft?"
    quoted = [QUOTED[0], thought, *QUOTED[1:-1], thought]
    with engine_of(copy, tmp_path / "store") as engine:
        ask(engine, *thoughtful)
        found = ask(engine, SUMMARISER, user(opencode(*quoted)), tools=None)
        prompt = engine.encoder.decode(found.prompt_ids)
    assert found.report.reused_tokens >= 0.8 * found.report.prompt_tokens
    assert prompt.count("In a loft?") == 2, "the last reply is not in the history, and stays quoted"
    assert prompt.count(thought) == (2 if drops else 1)


def test_a_quote_stays_where_its_messages_are_more_to_compute(model: Path, tmp_path: Path) -> None:
    """As where a template drops the reasoning of a turn with the next words of its user, and the turn was long."""
    later = "(messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list)"
    template = TEMPLATE.replace(
        "{%- if message.reasoning_content", f"{{%- if not {later} and message.reasoning_content"
    )
    copy = with_template(model, template, tmp_path / "copy")
    thoughtful = [*HISTORY[:2], {**HISTORY[2], "reasoning_content": "In a loft?"}, *HISTORY[3:]]
    with engine_of(copy, tmp_path / "store") as engine:
        first = ask(engine, *thoughtful)
        assert "In a loft?" in engine.encoder.decode(first.prompt_ids)
        assert ask(engine, SUMMARISER, user(opencode(*QUOTED[:-1])), tools=None).report.normalised == ()


def test_a_history_that_leaves_no_room_for_a_summary_stays_quoted(model: Path, tmp_path: Path) -> None:
    def asked(store: str, **limits: int) -> Report:
        with engine_of(model, tmp_path / store, **limits) as engine:
            ask(engine, *HISTORY)
            return ask(engine, SUMMARISER, user(opencode(*QUOTED)), tools=None).report

    unquoted_tokens = asked("roomy").prompt_tokens
    report = asked("narrow", max_context=unquoted_tokens + 40)
    assert report.normalised == () and report.prompt_tokens < unquoted_tokens - 500


TALK = [
    Message("user", "Look, please."),
    Message(
        "assistant",
        "I look.",
        tool_calls=(ToolCall("a", "look", '{"n":1}'), ToolCall("b", "look", "{}")),
        reasoning="Hm.",
    ),
    Message("tool", "Dust.", tool_call_id="a"),
    Message("tool", "[User]: Go on.\n\nSo it says.", tool_call_id="b"),
    Message("assistant", "Only dust."),
    Message("user", "Then go."),
]
WHOLE = [
    "[User]: Look, please.\n",
    "[Assistant reasoning]: Hm.",
    "[Assistant]: I look.",
    '[Assistant tool call]: look({"n":1})',
    "[Tool result]: Dust.",
    "[Assistant tool call]: look({})",
    "[Tool result]: [User]: Go on.\n\nSo it says.\n",
    "[Assistant]: Only dust.",
]


def test_what_is_not_in_the_history_stays() -> None:
    found = unquoted(TALK, opencode(*WHOLE), with_reasoning=True)
    assert found is not None and found.num_messages == 5 and found.text == opencode(NOTE)
    found = unquoted(TALK, opencode(*WHOLE), with_reasoning=False)
    assert found is not None and found.text == opencode(NOTE, "", WHOLE[1])
    without_error = [*WHOLE[:4], "[Tool error]: Dust, and more.", *WHOLE[5:]]
    found = unquoted(TALK, opencode(*without_error), with_reasoning=True)
    assert found is not None and found.text == opencode(NOTE, "", *without_error[1:6], WHOLE[6].strip())
    assert found.num_messages == 5, "its messages come all the same"
    summary = "\n\n<prior-summary>\nDust\n</prior-summary>"
    found = unquoted(
        [Message("user", "What did we do so far?"), *TALK], opencode(*WHOLE) + summary, with_reasoning=True
    )
    assert found is not None and found.num_messages == 6 and found.text == opencode(NOTE) + summary


@pytest.mark.parametrize(
    "text",
    [
        opencode(),
        opencode(WHOLE[0]),
        opencode(*WHOLE[1:]).replace("Only", "Much"),
        opencode(*WHOLE).replace("<conversation>\n", "<talk>\n"),
        opencode(*WHOLE).replace("\n</conversation>", ""),
        "<conversation>\n</conversation>",
        "\n</conversation> <conversation>\n" + "\n".join(WHOLE),
    ],
)
def test_texts_that_quote_no_history(text: str) -> None:
    assert unquoted(TALK, text, with_reasoning=True) is None


def test_a_part_is_the_whole_text_or_a_long_beginning_of_it() -> None:
    long = "".join(f"line {at}\n" for at in range(400))
    talk = [TALK[0], Message("assistant", "I look."), Message("tool", long)]
    for said, is_there in (
        (f"{long[:2000]}\n[truncated]", True),
        (f"{long[:900]}\n[truncated]", False),
        (long[:2000], False),
        (f"{long}more", False),
    ):
        found = unquoted(
            talk, opencode(WHOLE[0], "[Assistant]: I look.", f"[Tool result]: {said}"), with_reasoning=True
        )
        assert (found is not None) == is_there, said[-20:]


def test_hostile_quotes_end() -> None:
    """Every text looked for in every part, and a mark after each, would take minutes."""
    many = [Message("user" if at % 2 else "assistant", f"{'x' * 200}{at}") for at in range(4000)]
    parts = [f"[User]: {'x' * 200}{at}" for at in range(3999, -1, -1)]
    cuts = [f"[User]: {'x' * 1000}\n[truncated]" for _ in range(1000)]
    assert unquoted(many, opencode(*parts), with_reasoning=True) is None
    assert unquoted(many, opencode(*cuts, "[a" * 100_000), with_reasoning=True) is None
    assert unquoted([Message("tool", "x" * 100)] * 20_000, opencode(*parts), with_reasoning=True) is None


def test_histories_are_bounded_and_forgotten() -> None:
    kept = Histories(most_chars=100)
    for agent in "abcd":
        kept.put("n", agent, [Message("user", agent * 30)])
        kept.check()
    assert [len(kept.get("n", agent)) for agent in "abcd"] == [0, 1, 1, 1] and not kept.get("m", "b")
    kept.put("n", "b", [Message("user", "b" * 10)])
    kept.drop("n", "c")
    kept.drop("n", "c")
    kept.put("n", "e", [Message("user", "e" * 101)])
    kept.check()
    assert not any(kept.get("n", agent) for agent in "abcde"), "one alone that is too long is not kept"
