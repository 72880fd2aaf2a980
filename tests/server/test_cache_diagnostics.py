"""Why a prompt was computed again, in the forms of Anthropic and OpenAI, through their clients and over restarts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message as Answer

from rekindle import Engine
from rekindle.config import ServerSettings
from rekindle.engine.types import GenerationRequest
from rekindle.server.answers.comparison import ComparableIds, RequestParts
from rekindle.text.messages import Message
from rekindle.text.pictures import PictureMark
from tests.given import settings_of
from tests.server import conftest
from tests.server.conftest import Served
from tests.server.scripted import write_scripted_model

KEYS = {"left": "key-l", "right": "key-r"}
FILLER = "There is a long letter on the table. "
SAID: list[Any] = [{"role": "user", "content": f"talk please. {FILLER * 12}"}]
LATER: list[Any] = [
    *SAID,
    {"role": "assistant", "content": "It is in the attic of the house."},
    {"role": "user", "content": "talk."},
]
TOOL: Any = {"name": "look", "description": "To look.", "input_schema": {"type": "object", "properties": {}}}
FUNCTION: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}}
MODEL = "claude-opus-5-5"
NAMED = {"X-Agent-ID": "ada"}  # whose memory is on disk after one turn
BETA = "cache-diagnosis-2026-04-07"


@contextmanager
def served_from(directory: Path, **flags: Any) -> Iterator[Served]:
    """A server of two tenants whose store is in a directory."""
    flags = {"model": directory / "model", "store": directory / "store", "threads": 1, "hot_bytes": "64MiB", **flags}
    with Engine(settings_of(**flags)) as engine, conftest.serving(engine, ServerSettings(api_keys=KEYS)) as running:
        yield running


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("diagnosed")
    write_scripted_model(made / "model")
    return made


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Served]:
    with served_from(directory) as running:
        yield running


def message(
    served: Served,
    previous: str | None,
    said: list[Any] = SAID,
    *,
    key: str = "key-l",
    stream: bool = False,
    **more: Any,
) -> Answer:
    client = anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0)
    given: Any = {"system": "Be brief.", "tools": [TOOL], **more}
    given |= {
        "model": MODEL,
        "max_tokens": 4,
        "messages": said,
        "diagnostics": {"previous_message_id": previous},
    }
    if not stream:
        return client.messages.create(**given)
    with client.messages.stream(**given) as events:
        return events.get_final_message()


def reason(answer: Answer) -> Any:
    assert answer.diagnostics is not None and answer.diagnostics.cache_miss_reason is not None
    return answer.diagnostics.cache_miss_reason


@pytest.mark.parametrize("stream", [False, True])
def test_each_part_of_a_message_that_changed_is_named(served: Served, stream: bool) -> None:
    first = message(served, None, stream=stream)
    assert first.diagnostics is None and "diagnostics" in first.model_fields_set
    assert message(served, first.id, LATER, stream=stream).diagnostics is None
    other = {"role": "user", "content": f"talk, please. {FILLER * 12}"}
    for kind, said, change in (
        ("system_changed", LATER, {"system": "Be long."}),
        ("tools_changed", LATER, {"tools": [TOOL | {"name": "add"}]}),
        ("tools_changed", LATER, {"tools": [TOOL, TOOL | {"name": "add"}]}),
        ("messages_changed", [other, *LATER[1:]], {}),
        ("messages_changed", [*LATER[:1], *LATER[2:]][1:], {}),
    ):
        answer = message(served, first.id, said, stream=stream, **change)
        assert reason(answer).type == kind, change
        usage = answer.usage
        prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        missed = reason(answer).cache_missed_input_tokens
        assert 0 <= missed <= prompt - (usage.cache_read_input_tokens or 0), "no more than was computed"
    assert reason(message(served, first.id, LATER, thinking={"type": "disabled"})).type == "unavailable"
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    forced = {"tools": [search], "tool_choice": {"type": "tool", "name": "web_search"}}
    assert reason(message(served, first.id, LATER, stream=stream, **forced)).type == "tools_changed"


@pytest.mark.parametrize("text", ["talk.", 'talk of "quays"', "talk of C:\\", " "])
def test_messages_that_follow_are_no_change_whatever_their_role(served: Served, text: str) -> None:
    asked: Any = {"role": "user", "content": text}
    more: Any = {"role": "user", "content": "talk on."}
    first = message(served, None, [*LATER, asked])
    for said in ([more], [more, more], [{"role": "system", "content": "Be kind."}], [LATER[1], more]):
        assert message(served, first.id, [*LATER, asked, *said]).diagnostics is None, said
    blocks = [{"type": "text", "text": each["content"]} for each in (asked, more)]
    assert message(served, first.id, [*LATER, {"role": "user", "content": blocks}]).diagnostics is None
    second = message(served, None, [asked, more, asked])
    assert message(served, second.id, [asked, more, asked, more]).diagnostics is None
    for said in ([asked, asked, more], [asked, more], [more, asked, more], [asked, LATER[1], more, asked]):
        assert reason(message(served, second.id, said)).type == "messages_changed", said


def test_text_after_an_empty_message_is_no_change(served: Served) -> None:
    empty: Any = {"role": "user", "content": ""}
    first = message(served, None, [*LATER[:2], empty])
    for said in ([empty, LATER[2]], [LATER[2]]):
        assert message(served, first.id, [*LATER[:2], *said]).diagnostics is None, said
    assert reason(message(served, first.id, [LATER[0], LATER[2]])).type == "messages_changed"


@pytest.mark.parametrize("more", [" Now.", "n", '"', "\\n", "\\"])
def test_a_message_that_is_written_on_is_changed(served: Served, more: str) -> None:
    first = message(served, None, LATER)
    longer = [*LATER[:-1], {"role": "user", "content": f"{LATER[-1]['content']}{more}"}]
    assert reason(message(served, first.id, longer)).type == "messages_changed"
    assert reason(message(served, message(served, None, longer).id, LATER)).type == "messages_changed"


def test_a_picture_and_the_text_after_it_follow_without_a_break() -> None:
    ids, picture = ComparableIds(b"key"), str(PictureMark("0" * 64, 640, 480))

    def parts(content: str) -> RequestParts:
        return RequestParts("a model", GenerationRequest(messages=(Message("user", content),)), ("user",))

    for before, after, changed in (
        ("Look.", f"Look.{picture}", None),
        (f"Look.{picture}", f"Look.{picture}What is it?", None),
        (f"Look.{picture}Why?", f"Look.{picture}Why not?", "messages"),
    ):
        found = ids.compare(ids.new("msg_", "", parts(before)), "msg_", "", parts(after))
        assert found is not None and found.changed == changed, after


def test_a_result_of_a_tool_that_is_longer_is_changed(served: Served) -> None:
    def said(result: str) -> list[Any]:
        call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
        found = {"type": "tool_result", "tool_use_id": "toolu_1", "content": result}
        return [*SAID, {"role": "assistant", "content": [call]}, {"role": "user", "content": [found]}]

    first = message(served, None, said("a key"))
    assert message(served, first.id, [*said("a key"), LATER[-1]]).diagnostics is None
    assert reason(message(served, first.id, said("a key\nand a lamp"))).type == "messages_changed"


def test_what_is_missed_is_what_the_earlier_prompt_had(served: Served) -> None:
    first = message(served, None, system=FILLER * 20)
    longer = [*LATER[:-1], {"role": "user", "content": FILLER * 20}]
    answer = message(served, first.id, longer, system=f"New: {FILLER * 20}")
    prompt = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    prompt += first.usage.cache_creation_input_tokens or 0
    missed = reason(answer).cache_missed_input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert abs(missed - prompt) <= 0.1 * prompt


def test_ids_are_those_of_a_namespace(served: Served) -> None:
    first = message(served, None)
    for unknown in (first.id[:-1], f"{first.id[:20]}AAAA{first.id[24:]}", "msg_", "msg_🙂", f"resp_{first.id[4:]}"):
        assert reason(message(served, unknown)).type == "previous_message_not_found", unknown
    assert reason(message(served, first.id, key="key-r")).type == "previous_message_not_found"
    client = anthropic.Anthropic(base_url=served.url, api_key="key-l", max_retries=0)
    plain = client.messages.create(model=MODEL, max_tokens=1, messages=SAID)
    assert "diagnostics" not in plain.model_fields_set and len(plain.id) == 36
    assert reason(message(served, plain.id)).type == "previous_message_not_found", "it was not asked to be compared"


def test_the_beta_client_has_the_same(served: Served) -> None:
    beta = anthropic.Anthropic(base_url=served.url, api_key="key-l", max_retries=0).beta.messages
    given: Any = {"model": MODEL, "max_tokens": 1, "betas": [BETA], "messages": SAID}
    first = beta.create(**given, diagnostics={"previous_message_id": None})
    second = beta.create(**given, system="Be brief.", diagnostics={"previous_message_id": first.id})
    assert second.diagnostics is not None and second.diagnostics.cache_miss_reason is not None
    assert second.diagnostics.cache_miss_reason.type == "system_changed"


def test_the_line_that_signs_requests_is_no_change(served: Served) -> None:
    signed = "x-anthropic-billing-header: cc_version=2.1.{0}; cch={0};\nBe brief."
    first = message(served, None, system=signed.format("a1"))
    assert message(served, first.id, LATER, system=signed.format("b2")).diagnostics is None


def test_a_text_of_the_system_prompt_that_moves_is_compared_where_it_was(served: Served) -> None:
    status = "Be brief.\n\ngitStatus: This is the git status at the start.\n\nCurrent branch: main\n\nStatus:\n{0}"
    first = message(served, None, system=status.format("(clean)"))
    assert message(served, first.id, LATER, system=status.format("(clean)")).diagnostics is None
    assert reason(message(served, first.id, LATER, system=status.format("M a.py"))).type == "system_changed"


def response(served: Served, given: Any, other: str | None, *, key: str = "key-l", **more: Any) -> Any:
    options: Any = {"prompt_cache_options": {"comparison_response_id": other}} if other is not None else {}
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)
    options |= {"tools": [FUNCTION], "model": "default", "max_output_tokens": 4, **more}
    if not more.get("stream"):
        return client.responses.create(input=given, **options)
    *_, last = client.responses.create(input=given, **options)
    return last.response


@pytest.mark.parametrize("stream", [False, True])
def test_each_part_of_a_response_that_changed_is_named(served: Served, stream: bool) -> None:
    first = response(served, SAID, None, stream=stream, store=False)
    assert first.prompt_cache_diagnostics is None
    assert response(served, LATER, first.id, stream=stream).prompt_cache_diagnostics.type == "cache_hit"
    for reason, given, change in (
        ("tools_changed", LATER, {"tools": []}),
        ("input_changed", LATER, {"instructions": "Be brief."}),
        ("input_changed", LATER[1:], {}),
        ("input_changed", [{"role": "user", "content": f"{SAID[0]['content']}\ntalk."}], {}),
        ("reasoning_effort_changed", LATER, {"reasoning": {"effort": "high"}}),
    ):
        found = response(served, given, first.id, stream=stream, **change).prompt_cache_diagnostics
        assert (found.type, found.reason) == ("cache_miss", reason) and found.cache_missed_tokens >= 0
    missing = response(served, LATER, first.id, key="key-r", stream=stream).prompt_cache_diagnostics
    assert missing.type == "comparison_response_not_found"
    fresh = response(served, LATER, first.id, stream=stream, extra_body={"rekindle": {"reuse": "off"}})
    assert fresh.prompt_cache_diagnostics.type == "unavailable", "it continues the other, and nothing was reused"


def test_what_others_share_is_no_hit_once_the_conversation_is_gone(served: Served) -> None:
    rules = {"instructions": f"Be brief. {FILLER * 6}", "store": False}
    for name in ("kept", "gone"):
        named = {"extra_headers": {"X-Agent-ID": name}}
        said: list[Any] = [{"role": "user", "content": f"talk of {name}. {FILLER * 24}"}]
        first = response(served, said, None, **rules, **named)
        if name == "gone":
            assert served.send("DELETE", "/v1/agents/gone", key="key-l").status == 200
        later = [*said, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "talk."}]
        found = response(served, later, first.id, **rules, **named)
        assert found.usage.input_tokens_details.cached_tokens > 0, "at least what they share"
        assert found.prompt_cache_diagnostics.type == ("unavailable" if name == "gone" else "cache_hit")


def test_a_restart_and_another_model(directory: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with served_from(directory, store=store) as before:
        asked, answered = message(before, None), response(before, SAID, None, extra_headers=NAMED)
    with served_from(directory, store=store) as after:
        assert message(after, asked.id, LATER).diagnostics is None
        assert reason(message(after, asked.id, system="Be long.")).type == "system_changed"
        assert response(after, LATER, answered.id, extra_headers=NAMED).prompt_cache_diagnostics.type == "cache_hit"
    with served_from(directory, store=store, kv="q8h") as other:
        assert reason(message(other, asked.id, LATER)).type == "model_changed"
        found = response(other, LATER, answered.id).prompt_cache_diagnostics
        assert (found.type, found.reason) == ("cache_miss", "model_changed")
