"""Parameters that clients send to other servers, one at a time: what changes nothing is never refused.

Names and "off" values are those of vLLM's request models, llama.cpp's and Ollama's options, OpenRouter's and Open
WebUI's additions; `IGNORED` are named in the answer, the others mean what is done anyway.
"""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.model.params import BODIES, PARAMETERS, SamplingParams
from rekindle.server.anthropic.calls import ModelSide, parse_messages
from rekindle.server.anthropic.conversation import TemplateHabits
from rekindle.server.gate.caller import Caller
from rekindle.server.ollama.calls import ModelSide as OllamaSide
from rekindle.server.ollama.calls import parse_chat as ollama_chat
from rekindle.server.openai.calls import parse_chat, parse_completion
from rekindle.server.responses.calls import parse_response
from rekindle.server.responses.stored import StoredResponses
from rekindle.text.replies import ReplyFormat
from rekindle_sessions.http.bodies import SamplingOptions, sampling_of

SAID = [{"role": "user", "content": "Hi"}]
SIDE = ModelSide(ReplyFormat(), TemplateHabits(takes_late_system=True))
OLLAMA = OllamaSide("m", ReplyFormat(), 4096)

# Accepted in silence: the value is what happens anyway, or the parameter names, bills or routes.
NEUTRAL: dict[str, list[Any]] = {
    "return_token_ids": [None, False, True],
    "max_tokens": [-1, None],
    "top_k": [-1, 0],
    "n": [1],
    "use_beam_search": [False],
    "length_penalty": [1, 1.0],
    "early_stopping": [False],
    "include_stop_str_in_output": [False],
    "skip_special_tokens": [True],
    "detokenize": [True],
    "bad_words": [[]],
    "allowed_token_ids": [None, []],
    "logits_processors": [None, []],
    "logprob_token_ids": [None],
    "min_tokens": [0],
    "min_p": [0, 0.0],
    "repetition_penalty": [1, 1.0],
    "repeat_penalty": [1.0],
    "presence_penalty": [0],
    "frequency_penalty": [0.0],
    "typical_p": [1, 1.0],
    "tfs_z": [1.0],
    "top_a": [0],
    "top_n_sigma": [-1],
    "xtc_probability": [0],
    "dry_multiplier": [0],
    "dynatemp_range": [0],
    "mirostat": [0],
    "truncate_prompt_tokens": [None, -1],
    "return_tokens_as_token_ids": [None, False],
    "thinking_token_budget": [None, -1],
    "stop": [None, []],
    "stop_token_ids": [None, []],
    "ignore_eos": [False],
    "seed": [None, 3],
    "logit_bias": [None, {}],
    "response_format": [None, {"type": "text"}],
    "structured_outputs": [None, {}],
    "guided_json": [None],
    "guided_regex": [None],
    "guided_choice": [None],
    "guided_grammar": [None],
    "stream": [None, False],
    "stream_options": [
        None,
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": True},
        {"include_obfuscation": False},
    ],
    "modalities": [["text"], None],
    "suffix": [None, ""],
    "user": ["someone"],
    "metadata": [{"a": "b"}, None],
    "store": [False, True],
    "service_tier": ["auto"],
    "safety_identifier": ["x"],
    "prompt_cache_key": ["x"],
    "prompt_cache_retention": ["24h"],
}
CHAT_ONLY: dict[str, list[Any]] = {
    "best_of": [1, None],
    "chat_template": [None],
    "chat_template_kwargs": [None, {}, {"x": 1}],
    "add_generation_prompt": [True],
    "continue_final_message": [False],
    "add_special_tokens": [False],
    "echo": [False],
    "documents": [None, []],
    "logprobs": [None, False],
    "top_logprobs": [0, None],
    "include_reasoning": [True, False, None],
    "parallel_tool_calls": [True, False],
    "tool_choice": [None, "auto", "none"],
    "tools": [None],
    "functions": [None],
    "function_call": [None, "auto", "none"],
    "reasoning_effort": [None, "low", "minimal", "xhigh"],
    "reasoning": [None, {}, {"effort": "low"}, {"enabled": True}, {"exclude": True}],
    "thinking": [None, {"type": "enabled"}, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 5}],
    "enable_thinking": [None, True, False],
}
TEXT_ONLY: dict[str, list[Any]] = {
    "best_of": [1, None],
    "echo": [None, False, True],
    "logprobs": [None, 0, 5],
    "prompt_embeds": [None],
}
IGNORED: dict[str, list[Any]] = {
    "usage": [{"include": True}],
    "transforms": [["middle-out"]],
    "provider": [{"order": ["x"]}],
    "models": [["a", "b"]],
    "route": ["fallback"],
    "plugins": [[]],
    "keep_alive": ["5m", -1],
    "options": [{"num_ctx": 4096}],
    "num_ctx": [4096],
    "cache_prompt": [True],
    "id_slot": [-1],
    "n_keep": [0],
    "samplers": [["top_k"]],
    "timings_per_token": [False],
    "priority": [0],
    "request_id": ["abc"],
    "chat_id": ["c"],
    "message_id": ["m"],
    "features": [{}],
    "tool_ids": [[]],
    "filter_ids": [[]],
    "variables": [{}],
    "background_tasks": [{}],
    "extra_body": [{}],
    "moderation": [False],
    "prediction": [{"type": "content", "content": "x"}],
    "verbosity": ["low", "medium", "high"],
    "web_search_options": [{}],
    "mm_processor_kwargs": [{}],
    "media_io_kwargs": [{}],
    "vllm_xargs": [{}],
    "kv_transfer_params": [{}],
    "ec_transfer_params": [{}],
    "cache_salt": ["salt"],
    "return_token_offsets": [False],
    "return_prompt_text": [False],
    "routed_experts_prompt_start": [0],
    "stream_interval": [1],
    "spaces_between_special_tokens": [True, False],
    "watermarking": [False],
    "repetition_detection": [{}],
    "truncation_side": ["left"],
    "lora_request": [{}],
    "separate_reasoning": [True],
    "no_stop_trim": [False],
    "return_hidden_states": [False],
    "custom_params": [{}],
    "rid": ["1"],
    "a_name_of_tomorrow": ["x"],
}
MESSAGES: dict[str, list[Any]] = {
    "metadata": [{"user_id": "x"}],
    "service_tier": ["auto", "standard_only"],
    "container": ["c"],
    "inference_geo": ["eu"],
    "mcp_servers": [[], None],
    "context_management": [
        None,
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100000}}]},
        {"edits": [{"type": "compact_20260112"}]},
    ],
    "thinking": [None, {"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive"}],
    "output_config": [None, {}, {"effort": "low"}, {"effort": "max"}],
    "temperature": [1.0],
    "top_k": [5],
    "stop_sequences": [None, []],
    "speed": ["fast"],
    "a_name_of_tomorrow": ["x"],
}
RESPONSES: dict[str, list[Any]] = {
    "background": [False, None],
    "truncation": ["disabled", "auto"],
    "context_management": [None, []],
    "include": [None, [], ["reasoning.encrypted_content"], ["web_search_call.action.sources"]],
    "max_tool_calls": [5],
    "metadata": [None, {}],
    "parallel_tool_calls": [True, None],
    "prompt_cache_key": ["x"],
    "client_metadata": [{"a": "b"}],
    "reasoning": [None, {"effort": "low", "summary": "auto"}],
    "service_tier": ["flex"],
    "store": [False],
    "text": [None, {}, {"format": {"type": "text"}}, {"verbosity": "low"}],
    "top_logprobs": [0],
    "user": ["x"],
    "conversation": [None],
    "moderation": [False],
    "a_name_of_tomorrow": ["x"],
}


# A value for each sampling parameter other than its default, as JSON has it.
DRAWN: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 3,
    "stop": ["END"],
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"17": 2.0},
    "logprobs": 2,
    "prompt_logprobs": 3,
    "stop_token_ids": [4],
    "ignore_eos": True,
    "min_tokens": 2,
}


def chat(**given: Any) -> GenerationRequest:
    return parse_chat({"messages": SAID, **given}, Caller()).requests[0]


def text(**given: Any) -> GenerationRequest:
    return parse_completion({"prompt": "Hi", **given}, Caller()).requests[0]


def messages(**given: Any) -> GenerationRequest:
    return parse_messages({"messages": SAID, "max_tokens": 9, **given}, Caller(), SIDE).request


def response(**given: Any) -> GenerationRequest:
    return parse_response({"input": "Hi", **given}, Caller(), StoredResponses(None)).request


def cases(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


SWEEP = [
    *(("chat", name, value) for name, value in cases(NEUTRAL | CHAT_ONLY | IGNORED)),
    *(("text", name, value) for name, value in cases(NEUTRAL | TEXT_ONLY | IGNORED)),
    *(("messages", name, value) for name, value in cases(MESSAGES)),
    *(("response", name, value) for name, value in cases(RESPONSES)),
]
PARSERS = {"chat": chat, "text": text, "messages": messages, "response": response}


def test_nothing_that_changes_nothing_is_refused() -> None:
    assert len(SWEEP) > 241
    refused = []
    for dialect, name, value in SWEEP:
        try:
            PARSERS[dialect](**{name: value})
        except BadRequest as error:
            refused.append((dialect, name, value, str(error)))
    assert not refused


def test_every_sampling_parameter_reaches_the_engine() -> None:
    wanted = SamplingParams(**DRAWN | {"logit_bias": ((17, 2.0),)})
    assert DRAWN.keys() == PARAMETERS.keys()
    assert all(getattr(wanted, name) != getattr(SamplingParams(), name) for name in PARAMETERS)
    assert text(**DRAWN).params == wanted
    assert chat(**DRAWN | {"logprobs": True, "top_logprobs": 2}).params == wanted
    for name in BODIES["responses"]:
        assert getattr(response(**{name: DRAWN[name]}).params, name) == getattr(wanted, name), name
    session = sampling_of(SamplingOptions.model_validate({name: DRAWN[name] for name in BODIES["sessions"]}))
    assert session == {name: getattr(wanted, name) for name in BODIES["sessions"]}


@pytest.mark.parametrize("dialect", ["chat", "text"])
def test_what_nobody_knows_is_named_and_the_rest_is_not(dialect: str) -> None:
    for name, value in cases(IGNORED):
        assert PARSERS[dialect](**{name: value}).omitted.ignored == (name,), name
    for name, value in cases(NEUTRAL | (CHAT_ONLY if dialect == "chat" else TEXT_ONLY)):
        assert PARSERS[dialect](**{name: value}).omitted.ignored == (), name


def test_keys_inside_parameters_and_messages_are_named_with_their_place() -> None:
    call = chat(stream_options={"include_usage": True, "every": 3}, messages=[{**SAID[0], "timestamp": 7}] * 2)
    assert set(call.omitted.ignored) == {"stream_options.every", "messages[].timestamp"}
    with pytest.raises(BadRequest, match=r"unknown parameter 'rekindle\.speed'"):
        chat(rekindle={"speed": 1})


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"n_predict": 7}, {"max_tokens": 7}),
        ({"n_predict": 7, "max_tokens": 5}, {"max_tokens": 5}),
        ({"repeat_penalty": 1.25}, {"repetition_penalty": 1.25}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"enable_thinking": True}, {"chat_template_kwargs": {"enable_thinking": True}}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"enabled": False}}, {"reasoning_effort": "none"}),
        (
            {"functions": [{"name": "look", "parameters": {}}]},
            {"tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}]},
        ),
    ],
)
def test_other_names_mean_the_same(given: dict[str, Any], same: dict[str, Any]) -> None:
    assert chat(**given) == chat(**same)


def test_other_names_of_choices() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    body: dict[str, Any] = {"messages": SAID, "tools": tools}
    assert parse_chat({**body, "tool_choice": "any"}, Caller()).tool_choice.is_forced
    named = parse_chat({"messages": SAID, "functions": [{"name": "look"}], "function_call": {"name": "look"}}, Caller())
    assert named.tool_choice.name == "look" and named.tool_names == {"look"}


@pytest.mark.parametrize("last", [{}, {"prefix": True}])
def test_a_last_message_can_be_continued(last: dict[str, Any]) -> None:
    body: dict[str, Any] = {"messages": [*SAID, {"role": "assistant", "content": "It is", **last}]}
    if not last:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    request = parse_chat(body, Caller()).requests[0]
    assert request.reply_prefix == "It is" and request.messages is not None and len(request.messages) == 1
    for wrong in ({**last, "tool_calls": [{"function": {"name": "f"}}]}, {**last, "reasoning_content": "Hm."}):
        with pytest.raises(BadRequest, match="text only"):
            parse_chat({**body, "messages": [*SAID, {"role": "assistant", "content": "x", **wrong}]}, Caller())


def test_stop_strings_by_the_dozen() -> None:
    """Clients of completions send one for each heading of their prompt."""
    stops = [f"\n## {number}" for number in range(64)]
    ollama = ollama_chat({"messages": SAID, "options": {"stop": stops}}, Caller(), OLLAMA).request
    assert ollama is not None
    asked = [chat(stop=stops), text(stop=stops), messages(stop_sequences=stops), ollama]
    assert [request.params.stop for request in asked] == [tuple(stops)] * 4
    session = sampling_of(SamplingOptions(stop=stops))
    assert session is not None and session["stop"] == tuple(stops)
    for ask in (chat, text):
        with pytest.raises(BadRequest, match="stop must be at most 64"):
            ask(stop=[*stops, "more"])
    with pytest.raises(BadRequest, match="stop_sequences"):
        messages(stop_sequences=[*stops, "more"])
