"""What clients do to a history costs only its own words: arguments written anew, tools left out, tails that change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle.engine.intake.candidates import asks_for_summary
from rekindle.engine.types import Breakpoint, ChatResult, GenerationRequest
from rekindle.model.params import SamplingParams
from rekindle.text.messages import Message, normalise_messages
from tests.engine.rewriting import with_template
from tests.given import settings_of
from tests.proofs import proved
from tests.server.scripted import LOOK, write_scripted_model

WORDS = "You keep a house with an attic and a cellar, and you answer in one short sentence. "
TOOLS = [
    {"type": "function", "function": {"name": name, "description": WORDS * 3, "parameters": {"type": "object"}}}
    for name in ("look", "add")
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
STATUS = "gitStatus: This is the git status at the start.\nCurrent branch: main\n\nStatus:\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted") / "model")


@pytest.fixture(params=[{}, {"normalise": "off"}], ids=["default", "off"])
def options(request: pytest.FixtureRequest) -> dict[str, str]:
    return dict(request.param)


def engine_of(model: Path, store: Path, **given: Any) -> Engine:
    flags = {"threads": 1, "hot_bytes": "64MiB", "block_tokens": 16, "store": store, "anticipate": "off"}
    return proved(Engine(settings_of(model=str(model), **{**flags, **given})))


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    with engine_of(model, tmp_path / "store") as running:
        yield running


def ask(engine: Engine, *messages: Any, agent: str | None = "ada", tools: Any = TOOLS) -> ChatResult:
    request = GenerationRequest(
        messages=normalise_messages(list(messages)), agent=agent, tools=tools, params=GREEDY, structured=True
    )
    return engine.submit(request).result()


def system(tail: str = "") -> dict[str, str]:
    return {"role": "system", "content": WORDS * 6 + tail}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def called(arguments: str, text: str = "Let me look.") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}],
    }


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "talk Dust."}
VALUE = json.loads(LOOK)


@pytest.mark.parametrize(
    "written",
    [
        LOOK,
        json.dumps(VALUE, separators=(",", ":")),
        json.dumps(VALUE, separators=(",", ":"), ensure_ascii=False),
        json.dumps(dict(reversed(VALUE.items())), indent=2),
        json.dumps({**VALUE, "n": [1.0, {}]}),
    ],
)
@pytest.mark.parametrize("agent", ["ada", None])
def test_equal_arguments_are_the_stored_text(engine: Engine, written: str, agent: str | None) -> None:
    first = ask(engine, system(), user("look please"), agent=agent)
    assert LOOK in first.text
    second = ask(engine, system(), user("look please"), called(written), RESULT, agent=agent)
    # Of what no agent's name continues, the reply is encoded afresh.
    stored = len(first.prompt_ids) + (len(first.token_ids) if agent else 0)
    assert second.report.outcome == "extend" and second.report.reused_tokens >= stored - 2
    assert second.report.explanation is None


def test_it_works_after_a_restart(model: Path, tmp_path: Path) -> None:
    with engine_of(model, tmp_path / "store") as engine:
        first = ask(engine, system(), user("look please"))
        engine.flush()
    with engine_of(model, tmp_path / "store") as engine:
        written = json.dumps(VALUE, separators=(",", ":"))
        second = ask(engine, system(), user("look please"), called(written), RESULT)
        assert second.report.reused_tokens >= len(first.prompt_ids) + len(first.token_ids) - 2


def test_other_arguments_are_other_arguments(engine: Engine) -> None:
    ask(engine, system(), user("look please"))
    second = ask(engine, system(), user("look please"), called(json.dumps({**VALUE, "n": [2, {}]})), RESULT)
    assert second.report.outcome == "diverge" and second.report.explanation is not None
    assert (second.report.explanation.cause, second.report.explanation.message_index) == ("tool_arguments", 2)
    assert '"n": [2' in engine.encoder.decode(second.prompt_ids), "what was sent is what the model reads"


def test_a_history_without_its_tools_keeps_them_in_the_prompt(
    model: Path, tmp_path: Path, options: dict[str, str]
) -> None:
    with engine_of(model, tmp_path / "store", **options) as engine:
        history = [system(), user("look please"), called(LOOK), RESULT]
        ask(engine, system(), user("look please"))
        ask(engine, *history)
        asked = [*history, {"role": "assistant", "content": "It is in the attic."}, user("talk and summarise.")]
        report = ask(engine, *asked, tools=None).report
        if options:
            assert report.normalised == () and report.reused_tokens < 0.6 * report.prompt_tokens
            return
        assert report.reused_tokens >= 0.9 * report.prompt_tokens
        (kept,) = report.normalised
        assert (kept.kind, kept.text) == ("compaction", "look, add")
        assert kept.tokens >= 0.5 * report.reused_tokens
        fresh = ask(engine, system(), user("talk of something else"), tools=None).report
        assert fresh.normalised == (), "what is no history of it is as it was sent"
        other = ask(engine, *asked, tools=None, agent="eve").report
        assert other.normalised == (), "tools belong to their agent"


def test_a_history_without_its_tools_keeps_them_though_its_first_reply_lost_its_reasoning(engine: Engine) -> None:
    """As where a template drops reasoning, and the one turn so far is the one to summarise."""
    first = ask(engine, system(), user("ponder please"))
    assert first.text.startswith("<think>")
    asked = [system(), user("ponder please"), called('{"a": 4}', ""), RESULT, user("talk and summarise.")]
    report = ask(engine, *asked, tools=None).report
    assert [each.kind for each in report.normalised] == ["compaction"]
    assert report.reused_tokens >= len(first.prompt_ids) - 16
    other = ask(engine, system(), user("talk of lamps"), *asked[2:], tools=None).report
    assert other.normalised == (), "another history with the same system text is as it was sent"


PARAMETERS = '"parameters"'  # of a tool, as the template writes it
SUMMARISER = {"role": "system", "content": "You write summaries of conversations, in a few words."}


def test_a_history_with_a_summarisers_system_text_keeps_the_prompt_that_it_had(engine: Engine) -> None:
    history = [system("\n\ngitStatus: clean"), user("look please"), called(LOOK), RESULT]
    ask(engine, *history[:2])
    ask(engine, *history)
    history.append({"role": "assistant", "content": "In the attic."})
    ask(engine, *history, user("talk more"))
    written = called(json.dumps(VALUE, separators=(",", ":")))
    asked = [SUMMARISER, history[1], written, *history[3:], user("talk and summarise.")]
    result = ask(engine, *asked, tools=None)
    assert result.report.reused_tokens >= 0.9 * result.report.prompt_tokens
    assert [(each.kind, each.message_index, each.text) for each in result.report.normalised] == [
        ("tail", 0, "gitStatus: clean"),
        ("compaction", None, "look, add"),
        ("compaction", 0, SUMMARISER["content"]),
    ]
    prompt = engine.encoder.decode(result.prompt_ids)
    newest = prompt.index("talk and summarise.")
    assert SUMMARISER["content"] + "\n\ntalk and summarise." in prompt and prompt.count(PARAMETERS) == 2
    assert prompt.count("gitStatus: clean") == 1 and prompt.index("In the attic.") < newest
    again = ask(engine, *history[:4])
    assert again.report.outcome != "cold" and "summaries" not in engine.encoder.decode(again.prompt_ids)


@pytest.mark.parametrize(
    "asked",
    [
        [SUMMARISER, user("talk of lamps"), called(LOOK), RESULT, user("talk and summarise.")],
        [SUMMARISER, user("talk and summarise: look please")],
        [SUMMARISER, SUMMARISER, user("look please"), called(LOOK), RESULT, user("talk and summarise.")],
        [SUMMARISER, user("look please"), called(LOOK), RESULT],
    ],
    ids=["another history", "a single message", "two system texts", "no user's words at the end"],
)
def test_a_summarisers_system_text_stays_where_it_is_not_certain_to_belong(engine: Engine, asked: list[Any]) -> None:
    history = [system(), user("look please"), called(LOOK), RESULT]
    ask(engine, *history[:2])
    ask(engine, *history)
    result = ask(engine, *asked, tools=None)
    assert result.report.normalised == ()
    assert PARAMETERS not in engine.encoder.decode(result.prompt_ids)


def test_what_a_conversation_without_a_name_left_out_is_never_taken_from_another(engine: Engine) -> None:
    """Two users of one key whose conversations begin with the same words, and with the same reply."""
    history = [system(), user("look please"), called(LOOK), RESULT]
    ask(engine, *history[:2], agent=None)
    ask(engine, *history, agent=None)
    for asked in (
        [*history, user("talk and summarise.")],
        [SUMMARISER, *history[1:], user("talk and summarise.")],
        [{"role": "system", "content": "You serve Bob."}, *history[1:], user("talk of a summary")],
    ):
        result = ask(engine, *asked, tools=None, agent=None)
        prompt = engine.encoder.decode(result.prompt_ids)
        assert result.report.normalised == () and PARAMETERS not in prompt
        assert (system()["content"] in prompt) == (asked[0] == system())


@pytest.mark.parametrize(
    "beginning",
    [system(), {"role": "system", "content": "You are a strict judge. Say PASS or FAIL."}],
    ids=["its own system text", "a judge's"],
)
def test_a_turn_without_tools_that_asks_for_no_summary_is_as_it_was_sent(
    engine: Engine, beginning: dict[str, str]
) -> None:
    history = [system(), user("look please and summarise"), called(LOOK), RESULT]
    ask(engine, *history[:2])
    ask(engine, *history)
    attic = {"role": "assistant", "content": "A summary: it is in the attic."}
    result = ask(engine, beginning, *history[1:], attic, user("talk of it"), tools=None)
    prompt = engine.encoder.decode(result.prompt_ids)
    assert result.report.normalised == () and PARAMETERS not in prompt and beginning["content"] in prompt
    own = "You write a summary when you are asked to."
    for messages in ([{"role": "system", "content": own}, *history[1:]], [*history, user("talk " + "on " * 3000)]):
        assert not asks_for_summary(normalise_messages(messages), [own])
    long = ("word " * 2000, " summary ", "word " * 2000)
    assert not asks_for_summary([Message("user", "".join(long))], [])
    assert asks_for_summary([Message("user", "".join(long[:2]))], []) and asks_for_summary(
        [Message("user", long[1])], []
    )


SKILLS = "Skills: " + "a set of instructions that is kept in a file. " * 6


def test_the_end_of_a_system_text_that_comes_later_after_a_summary_is_put_back(engine: Engine) -> None:
    """As Codex sends what its developer says: at the head of a conversation, and after the user's words once it has
    begun anew."""
    head = {"role": "system", "content": f"{system()['content']}\n\n{SKILLS}"}
    ask(engine, head, user("look please"))
    begun = [system(), user("look please"), {"role": "system", "content": SKILLS}, user("It was found. talk more")]
    first = ask(engine, *begun)
    assert [(each.kind, each.message_index) for each in first.report.normalised] == [("compaction", 2)]
    assert first.report.reused_tokens >= 0.9 * first.report.prompt_tokens
    prompt = engine.encoder.decode(first.prompt_ids)
    assert prompt.count(SKILLS.strip()) == 1 and prompt.index("Skills:") < prompt.index(PARAMETERS)
    again = ask(engine, *begun, {"role": "assistant", "content": first.text}, user("talk on"))
    assert again.report.reused_tokens >= len(first.prompt_ids) - 2, "its head is known from then on, too"
    asked = [*begun, {"role": "assistant", "content": first.text}, user("talk and summarise.")]
    report = ask(engine, *asked, tools=None).report
    assert report.reused_tokens >= 0.9 * report.prompt_tokens and len(report.normalised) == 2
    other = {"role": "system", "content": SKILLS.replace("file", "book")}
    for changed in ([*begun[:2], other, begun[3]], [{**head, "content": "Else."}, *begun[1:]]):
        assert ask(engine, *changed).report.normalised == ()
    assert ask(engine, *begun, agent="eve").report.normalised == ()


ENVIRONMENT = "# Environment\nYou have been invoked in the following environment: \n - Shell: bash"
KINDS = "Available agent types for the Agent tool:" + "\n- Explore: reads, and changes nothing in the house." * 12
TODAY = "Today's date is 2026-11-30."


def status(file: str, text: str) -> dict[str, str]:
    context = f"# gitStatus\nCurrent branch: main\n\nStatus:\n?? {file}"
    return user(f"<system-reminder>\nYou can use the following context:\n{context}\n</system-reminder>\n\n{text}")


def test_what_claude_code_says_after_the_first_words_is_reused(engine: Engine) -> None:
    """Its requests as 2.1.332 sends them: a status before the user's words and the environment after them, all of it
    with the words of a summary in between once it has begun anew."""
    late = {"role": "system", "content": "\n\n".join((ENVIRONMENT, KINDS, TODAY))}
    first = ask(engine, system(), status("a.txt", "look please"), late)
    ask(engine, system(), status("a.txt", "look please"), late, called(LOOK), RESULT)
    assert [each.kind for each in first.report.normalised] == ["tail"]
    other = ask(engine, system(), status("b.txt", "look into it"), late, agent="eve")
    decode, ids = engine.encoder.decode, first.prompt_ids
    head = next(num for num in range(len(ids), 0, -1) if TODAY not in decode(ids[:num]))
    assert other.report.reused_tokens >= head

    later = {"role": "system", "content": "\n\n".join((KINDS, ENVIRONMENT, TODAY))}
    begun = [system(), user("It goes on from a summary: dust."), {"role": "assistant", "content": "Dust."}]
    asked = normalise_messages([*begun, status("a.txt", "talk of it"), later])
    marks = (Breakpoint(3, None, 300), Breakpoint(4, None, 300))
    request = GenerationRequest(
        messages=asked, agent="ada", tools=TOOLS, params=GREEDY, structured=True, breakpoints=marks
    )
    result = engine.submit(request).result()
    assert result.report.reused_tokens >= head
    assert [(each.kind, each.message_index) for each in result.report.normalised] == [("tail", 2), ("compaction", 4)]
    user_end, late_end = (decode(result.prompt_ids[:num]) for num in result.report.breakpoint_tokens)
    assert user_end.endswith("talk of it") and late_end.endswith(TODAY)
    again = ask(engine, *begun, status("a.txt", "talk of it"), later, called(LOOK), RESULT)
    assert again.report.reused_tokens >= len(result.prompt_ids) - 2
    elsewhere = ask(engine, *begun, status("a.txt", "talk of it"), later, agent="zoe").report
    assert elsewhere.normalised == (), "whose conversation it goes on from is not known"


def test_breakpoints_of_a_summarisers_request_keep_their_places(engine: Engine) -> None:
    history = [system(), user("look please"), called(LOOK), RESULT]
    ask(engine, *history)
    asked = normalise_messages([SUMMARISER, *history[1:], user("talk and summarise.")])
    request = GenerationRequest(
        messages=asked,
        agent="ada",
        params=GREEDY,
        structured=True,
        breakpoints=(Breakpoint(0, len(asked[0].content), 300), Breakpoint(4, len("talk and"), 300)),
    )
    result = engine.submit(request).result()
    decode = engine.encoder.decode
    first, second = (decode(result.prompt_ids[:num]) for num in result.report.breakpoint_tokens)
    assert first.endswith(system()["content"].strip()[-20:]) and second.endswith("talk and")


def test_a_new_conversation_reuses_tools_behind_a_changed_tail(
    model: Path, tmp_path: Path, options: dict[str, str]
) -> None:
    with engine_of(model, tmp_path / "store", **options) as engine:
        ask(engine, system(f"\n\n{STATUS}?? a.txt"), user("talk to me"))
        report = ask(engine, system(f"\n\n{STATUS}?? a.txt\n?? b.txt"), user("talk of lamps"), agent="eve").report
        if options:
            assert report.reused_tokens < 0.6 * report.prompt_tokens
            return
        assert report.reused_tokens >= 0.8 * report.prompt_tokens
        assert [each.kind for each in report.normalised] == ["tail"]


@pytest.mark.parametrize("agent", ["ada", None])
def test_a_resumed_conversation_keeps_its_first_tail_and_reads_the_new_one(engine: Engine, agent: str | None) -> None:
    first, later, last = (system(f"\n\n{STATUS}?? {name}.txt") for name in "abc")
    said, answer = user("talk to me of the house"), {"role": "assistant", "content": "It is in the attic of the house."}
    history: list[Any] = [said, answer, user("look please"), called(LOOK), RESULT, answer]
    before = [ask(engine, first, *history[:end], agent=agent) for end in (1, 3, 5)][-1]
    for tail, file in ((later, "?? b.txt"), (last, "?? c.txt")):
        history += [user(f"look into {file}")]
        for more in ([], [called(LOOK), RESULT]):
            history += more
            result = ask(engine, tail, *history, agent=agent)
            assert result.report.reused_tokens >= len(before.prompt_ids) - 2, "it only grew"
            text, before = engine.encoder.decode(result.prompt_ids), result
            assert text.count("?? a.txt") == 1 and text.count(f"{file}\n\nlook into") == 1
        history += [answer]
    plain = ask(engine, last, user("talk of something else"), agent=agent)
    assert "?? a.txt" not in engine.encoder.decode(plain.prompt_ids), "another conversation has its own tail alone"


def test_a_conversation_that_only_begins_alike_keeps_its_own_tail(engine: Engine) -> None:
    said, answer = user(f"talk to me. {WORDS * 5}"), {"role": "assistant", "content": "There is no key in this house."}
    ask(engine, system(f"\n\n{STATUS}?? a.txt"), said)
    result = ask(engine, system(f"\n\n{STATUS}?? b.txt"), said, answer, user("look please"), agent="eve")
    text = engine.encoder.decode(result.prompt_ids)
    assert "?? a.txt" not in text and text.count("?? b.txt") == 1


def test_the_model_reads_the_tail_before_the_users_words(engine: Engine) -> None:
    result = ask(engine, system(f"\n\n{STATUS}?? a.txt"), user("talk to me"))
    text = engine.encoder.decode(result.prompt_ids)
    assert text.count("?? a.txt") == 1 and text.index('"name": "add"') < text.index("gitStatus:") < text.index(
        "talk to"
    )


def test_messages_as_sent_are_not_changed(engine: Engine) -> None:
    """The caller's own values stay its own."""
    messages = normalise_messages([system(f"\n\n{STATUS}?? a"), user("talk to me")])
    before = tuple(Message(each.role, each.content) for each in messages)
    request = GenerationRequest(messages=messages, agent="ada", tools=TOOLS, params=GREEDY)
    engine.submit(request).result()
    assert tuple(Message(each.role, each.content) for each in messages) == before


WRITES_VALUES = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content -}}"
    "{%- for c in m.tool_calls or [] -%}{{- '\n<tool_call>\n<function=' + c.function.name + '>\n' -}}"
    "{%- for key, value in c.function.arguments.items() -%}"
    "{{- '<parameter=' + key + '>\n' + (value | string) + '\n</parameter>\n' -}}{%- endfor -%}"
    "{{- '</function>\n</tool_call>' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def test_a_call_that_was_cut_off_does_not_end_the_conversation(model: Path, tmp_path: Path) -> None:
    """Templates that write each value take objects only; the call is sent back in every turn from then on."""
    copy = with_template(model, WRITES_VALUES, tmp_path / "copy")
    with engine_of(copy, tmp_path / "store") as engine:
        history = [user("Look."), called('{"path": "attic", "text": "wri'), {**RESULT, "content": "cut off"}]
        first = ask(engine, *history)
        assert [(each.kind, each.count) for each in first.report.left_out] == [("arguments", 1)]
        second = ask(engine, *history, {"role": "assistant", "content": first.text}, user("And now?"))
        assert [(each.kind, each.count) for each in second.report.left_out] == [("arguments", 1)]
        assert second.report.reused_tokens > 0
        whole = ask(engine, user("Look."), called('{"path": "attic"}'), RESULT)
        assert not whole.report.left_out
