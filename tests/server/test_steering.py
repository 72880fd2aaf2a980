"""How a caller steers a reply: which tool is called, how much is thought."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rekindle.engine.tool_choice import ToolChoice, steered
from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.server.answers.options import parse_tool_choice, template_kwargs
from rekindle.server.anthropic.calls import ModelSide, parse_messages
from rekindle.server.anthropic.conversation import TemplateHabits
from rekindle.server.gate.caller import Caller
from rekindle.server.openai.calls import parse_chat
from rekindle.server.responses.calls import parse_response
from rekindle.server.responses.stored import StoredResponses
from rekindle.text.constraints.types import Calls
from rekindle.text.messages import Message
from rekindle.text.replies import ReplyFormat
from rekindle.text.replies.envelope import EnvelopeForm
from rekindle.text.replies.pythonic import PythonicForm
from rekindle.text.replies.reader import CallMarks

FORM, BARE = ReplyFormat(tools=EnvelopeForm()), ReplyFormat()
ASKED = GenerationRequest(messages=(Message("user", "Hi"),))
AUTO, NONE, ANY, LOOK = ToolChoice(), ToolChoice("none"), ToolChoice("required"), ToolChoice("required", "look")


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, AUTO),
        ("auto", AUTO),
        ("none", NONE),
        ("required", ANY),
        ({"type": "function", "function": {"name": "look"}}, LOOK),
        ({"type": "function", "name": "look"}, LOOK),
    ],
)
def test_openais_choices(given: Any, choice: ToolChoice) -> None:
    assert parse_tool_choice(given) == choice


@pytest.mark.parametrize(
    "given", ["any", 1, [], {"type": "function"}, {"type": "web_search"}, {"type": "function", "name": None}]
)
def test_other_choices_are_refused(given: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_tool_choice(given)
    assert caught.value.param == "tool_choice"


def test_a_forced_call_begins_the_reply() -> None:
    for choice in (ANY, LOOK):
        found = steered(ASKED, FORM, choice, tool_names=["look", "add"])
        assert found.reply_prefix == FORM.opening(choice.name)
        assert found.messages == ASKED.messages
    assert '"look"' in steered(ASKED, FORM, LOOK, tool_names=["look"]).reply_prefix


@pytest.mark.parametrize("choice", [AUTO, NONE])
@pytest.mark.parametrize("names", [[], ["look"]])
def test_nothing_else_changes_the_request(choice: ToolChoice, names: list[str]) -> None:
    calls = Calls(()) if names and choice == AUTO else None
    assert steered(ASKED, FORM, choice, tool_names=names) == replace(ASKED, calls=calls)
    if not names or choice == NONE:
        assert steered(ASKED, BARE, choice, tool_names=names) is ASKED


FUNCTIONS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "add"}},
]
OFFERED = replace(ASKED, tools=FUNCTIONS)
NAMES = ["look", "add"]


def called(choice: ToolChoice, form: ReplyFormat = FORM, **given: Any) -> Calls:
    calls = steered(OFFERED, form, choice, tool_names=NAMES, **given).calls
    assert calls is not None
    return calls


def test_the_arguments_of_forced_and_of_strict_calls_have_schemas() -> None:
    forced = called(LOOK)
    assert (forced.is_forced, forced.name, forced.parallel) == (True, "look", False)
    assert [(tool.name, tool.schema, tool.is_strict) for tool in forced.tools] == [
        ("look", {"type": "object"}, False),
        ("add", None, False),
    ]
    strict = called(AUTO, strict={"look": "tools[0].function.parameters"})
    assert (strict.is_forced, strict.parallel) == (False, True)
    assert [(tool.schema, tool.is_strict) for tool in strict.tools] == [({"type": "object"}, True), (None, False)]
    assert strict.tools[0].param == "tools[0].function.parameters"
    assert not called(AUTO, strict={"look": "x"}, parallel=False).parallel


def test_some_of_the_tools_can_be_allowed() -> None:
    some = parse_tool_choice(
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "add"}}]}}
    )
    assert some == ToolChoice("required", allowed=frozenset(("add",)))
    assert [tool.name for tool in called(some).tools] == ["add"]
    for names in ((), ("jump",)):
        with pytest.raises(BadRequest, match=r"no tool 'jump'|at least one"):
            called(ToolChoice("auto", allowed=frozenset(names)))


def test_a_format_that_cannot_be_enforced_says_so() -> None:
    pythonic = ReplyFormat(tools=PythonicForm(CallMarks("[", "]")))
    found = steered(OFFERED, pythonic, AUTO, tool_names=NAMES, strict={"look": "x"})
    assert found.omitted.ignored == ("tools.strict",)
    with pytest.raises(BadRequest, match="cannot be forbidden"):
        steered(OFFERED, pythonic, ToolChoice("auto", allowed=frozenset(("add",))), tool_names=NAMES)


@pytest.mark.parametrize(
    ("form", "choice", "names", "param"),
    [
        (FORM, ANY, [], "choice"),
        (FORM, LOOK, [], "choice"),
        (FORM, LOOK, ["add"], "choice"),
        (BARE, AUTO, ["look"], "functions"),
        (BARE, LOOK, ["look"], "functions"),
    ],
)
def test_what_cannot_be_done_is_refused_in_the_words_of_the_dialect(
    form: ReplyFormat, choice: ToolChoice, names: list[str], param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        steered(ASKED, form, choice, tool_names=names, params=("functions", "choice"))
    assert caught.value.param == param
    assert str(caught.value).startswith(param)


def test_a_call_is_not_forced_behind_ids() -> None:
    with pytest.raises(BadRequest, match="cannot be forced"):
        steered(GenerationRequest(token_ids=(1, 2)), FORM, ANY, tool_names=["look"])


@pytest.mark.parametrize(
    ("given", "effort", "told"),
    [
        (None, None, {}),
        ({}, None, {}),
        (None, "none", {"enable_thinking": False}),
        (None, "low", {"enable_thinking": True, "reasoning_effort": "low"}),
        (None, "minimal", {"enable_thinking": True, "reasoning_effort": "minimal"}),
        (None, "xhigh", {"enable_thinking": True, "reasoning_effort": "high"}),
        (None, "max", {"enable_thinking": True, "reasoning_effort": "high"}),
        ({"reasoning_effort": "max"}, "low", {"enable_thinking": True, "reasoning_effort": "max"}),
        ({"enable_thinking": False, "a": [1]}, "low", {"enable_thinking": False, "reasoning_effort": "low", "a": [1]}),
    ],
)
def test_what_a_template_is_told(given: Any, effort: str | None, told: dict[str, Any]) -> None:
    assert template_kwargs(given, effort) == told


@pytest.mark.parametrize(
    ("effort", "told"), [("low", "low"), ("medium", "medium"), ("high", "high"), ("xhigh", "high"), ("max", "high")]
)
def test_an_effort_means_the_same_in_every_dialect(effort: str, told: str) -> None:
    hi = [{"role": "user", "content": "Hi"}]
    side = ModelSide(ReplyFormat(), TemplateHabits(takes_late_system=True))
    asked = (
        parse_chat({"messages": hi, "reasoning_effort": effort}, Caller()).requests[0],
        parse_response({"input": "Hi", "reasoning": {"effort": effort}}, Caller(), StoredResponses(None)).request,
        parse_messages({"messages": hi, "max_tokens": 9, "output_config": {"effort": effort}}, Caller(), side).request,
    )
    assert [request.template_kwargs["reasoning_effort"] for request in asked] == [told] * 3


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "eos_token", "self", "a b", "", "1a"])
def test_a_caller_may_not_say_for_the_engine(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        template_kwargs({name: "x"}, None)
    assert caught.value.param == "chat_template_kwargs"
