"""Custom tools, shells and patches of the responses API, in requests, replies and histories."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import BadRequest
from rekindle.server.responses.call_items import APPLY_PATCH, BY_CALL, CUSTOM, LOCAL_SHELL, SHELL, arguments_of, held_of
from rekindle.text.messages import Message, ToolCall
from tests.server.test_responses_calls import answer, kept, messages, parse

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'}
PATCH = {"type": "custom", "name": "patch", "description": "Edits files.", "format": GRAMMAR}
EXEC = {"type": "exec", "env": {}, "command": ["ls", "-l"]}
UPDATE = {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}
DELETE = {"type": "delete_file", "path": "a"}
EDIT: dict[str, Any] = {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}


def written(name: str, arguments: Any) -> str:
    """A call as the model of these tests writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    call = parse(tools=[PATCH, {"type": "custom", "name": "say", "format": {"type": "text"}}])
    assert call.request.tools is not None
    patch, say = (tool["function"] for tool in call.request.tools)
    assert patch["name"] == "patch"
    assert patch["description"].startswith("Edits files.\n\n") and GRAMMAR["definition"] in patch["description"]
    assert patch["parameters"]["required"] == say["parameters"]["required"] == ["input"]
    assert "description" not in say


def test_its_call_is_answered_with_the_text_and_comes_back() -> None:
    first = kept(parse("Go!", tools=[PATCH]), written("patch", {"input": 'say "hi"\n'}))
    (item,) = first.response["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", 'say "hi"\n')
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    wanted = (
        Message("user", "Go!"),
        Message("assistant", "", tool_calls=(ToolCall(item["call_id"], "patch", '{"input": "say \\"hi\\"\\n"}'),)),
        Message("tool", "done", tool_call_id=item["call_id"]),
    )
    assert messages([result], first, previous_response_id="resp_1") == wanted
    assert messages([{"role": "user", "content": "Go!"}, item, result]) == wanted


def test_its_text_is_streamed() -> None:
    events, whole = answer(parse(tools=[PATCH]), "So.", written("patch", {"input": "é"}), written("patch", {"no": 1}))
    found = [event for event in events if "custom_tool_call_input" in event["type"]]
    assert [event["type"].rpartition(".")[2] for event in found] == ["delta", "done", "delta", "done"]
    assert [event.get("delta", event.get("input")) for event in found] == ["é", "é", '{"no": 1}', '{"no": 1}']
    assert [item["type"] for item in whole["output"]] == ["message", "custom_tool_call", "custom_tool_call"]
    assert {event["item_id"] for event in found} == {item["id"] for item in whole["output"][1:]}


@pytest.mark.parametrize(
    ("tool", "arguments", "field", "held"),
    [
        ("local_shell", {"command": ["ls", "-l"], "odd": 1}, "action", EXEC),
        ("shell", {"commands": ["ls", "pwd"], "timeout_ms": 9}, "action", {"commands": ["ls", "pwd"], "timeout_ms": 9}),
        ("apply_patch", UPDATE, "operation", UPDATE),
        ("apply_patch", {"type": "delete_file", "path": "a", "diff": ""}, "operation", DELETE),
    ],
)  # fmt: skip
def test_what_a_client_runs_is_answered_in_its_form(tool: str, arguments: Any, field: str, held: Any) -> None:
    call = parse(tools=[{"type": tool}])
    assert call.request.tools is not None and call.request.tools[0]["function"]["name"] == tool
    events, whole = answer(call, written(tool, arguments))
    (item,) = whole["output"]
    assert (item["type"], item[field], item["status"]) == (f"{tool}_call", held, "completed")
    added, done = (event for event in events if event["type"].startswith("response.output_item."))
    assert added["item"] == {**item, "status": "in_progress"} and done["item"] == item


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("local_shell", {"command": "ls"}),
        ("local_shell", {"command": []}),
        ("shell", {"commands": [7]}),
        ("apply_patch", {"type": "update_file", "path": "a"}),
        ("apply_patch", {"type": "chmod", "path": "a", "diff": ""}),
        ("shell", [1]),
    ],
)
def test_arguments_of_another_form_are_a_functions(tool: str, arguments: Any) -> None:
    _, whole = answer(parse(tools=[{"type": tool}]), written(tool, arguments))
    (item,) = whole["output"]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", tool, arguments)


def test_a_shells_call_that_is_cut_off_is_a_functions() -> None:
    text = written("shell", {"commands": ["ls"]}).partition("</tool_call>")[0][:-8]
    _, whole = answer(parse(tools=[{"type": "shell"}]), text, reason="length")
    assert [(item["type"], item["status"]) for item in whole["output"]] == [("function_call", "incomplete")]


def test_histories_of_a_client_that_runs_tools() -> None:
    parts = [
        {"stdout": "a\nb\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
        {"stdout": "", "stderr": "slow\n", "outcome": {"type": "timeout"}},
    ]
    found = messages(
        [
            {"role": "user", "content": "Go!"},
            {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "status": "completed", "action": EXEC},
            {"type": "local_shell_call_output", "id": "lsh_1", "output": "x"},
            {**EDIT, "call_id": "c2", "action": {"commands": ["ls"], "timeout_ms": None}},
            {"type": "shell_call_output", "call_id": "c2", "output": parts},
            {"type": "apply_patch_call", "call_id": "c3", "operation": UPDATE},
            {"type": "apply_patch_call_output", "call_id": "c3", "status": "failed", "output": "no such line"},
            {"type": "apply_patch_call", "call_id": "c4", "operation": DELETE},
            {"type": "apply_patch_call_output", "call_id": "c4", "status": "completed"},
        ]
    )
    calls = [message.tool_calls[0] for message in found if message.tool_calls]
    assert [(call.id, call.name) for call in calls] == [
        ("c1", "local_shell"), ("c2", "shell"), ("c3", "apply_patch"), ("c4", "apply_patch")
    ]  # fmt: skip
    assert [json.loads(str(call.arguments)) for call in calls] == [
        {"command": ["ls", "-l"]}, {"commands": ["ls"]}, UPDATE, DELETE
    ]  # fmt: skip
    assert [(each.content, each.tool_call_id) for each in found if each.role == "tool"] == [
        ("x", "c1"),
        ("a\nb\n(exit code 0)\nslow\n(timed out)", "c2"),
        ("no such line", "c3"),
        ("completed", "c4"),
    ]


def test_a_result_needs_its_call() -> None:
    with pytest.raises(BadRequest, match="no function call with call_id 'c9'"):
        messages([EDIT, {"type": "custom_tool_call_output", "call_id": "c9", "output": "x"}])


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "shell"}, "shell"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}]}, "shell"),
    ],
)
def test_they_can_be_forced(choice: Any, name: str) -> None:
    call = parse(tools=[PATCH, {"type": "shell"}], tool_choice=choice)
    assert (call.tool_choice.kind, call.tool_choice.name) == ("required", name)


@given(st.sampled_from([CUSTOM, LOCAL_SHELL, SHELL, APPLY_PATCH]), st.text() | st.lists(st.text(), min_size=1))
def test_what_was_written_is_what_comes_back(kind: Any, given_value: Any) -> None:
    """Arguments in a kind's form have the same value after a turn, which finds the history again."""
    text = given_value if isinstance(given_value, str) else "".join(given_value)
    words = given_value if isinstance(given_value, list) else [given_value]
    arguments = {
        "custom": {"input": text},
        "local_shell": {"command": words, "timeout_ms": 5},
        "shell": {"commands": words},
        "apply_patch": {"type": "create_file", "path": text, "diff": text},
    }[kind.tool]
    held = held_of(kind, json.dumps(arguments))
    assert BY_CALL[kind.call] is kind and held is not None
    assert json.loads(arguments_of({"type": kind.call, kind.holds: held})) == arguments
