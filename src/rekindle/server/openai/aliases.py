"""Names and values that other servers, and older clients, have for OpenAI's parameters.

Owns the translation of a body into the parameters of `bodies`; one that is given under its own name wins. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.errors import BadRequest
from rekindle.server.answers.validation import NEUTRAL, short

# llama.cpp's and Ollama's names.
_RENAMED = {"n_predict": "max_tokens", "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
# Values that mean "not given" to other servers: no limit, no cut-off.
_UNSET = {"max_tokens": -1, "top_k": -1, "max_completion_tokens": -1, "thinking_token_budget": -1}
# Parameters of samplers and outputs that are not implemented, with the values at which they change nothing.
TEXT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "typical_p": (1,),
    "typical": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "mirostat": (0,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "detokenize": (True,),
    "truncate_prompt_tokens": (-1,),
    "thinking_token_budget": (),
    "prompt_embeds": (),
}
CHAT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **TEXT_NEUTRAL,
    "add_special_tokens": (False,),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "return_tokens_as_token_ids": (False,),
}


def text_parameters(body: Any) -> Any:
    """Return a body of completions with OpenAI's names; anything but an object as it is."""
    if not isinstance(body, dict):
        return body
    given = dict(body)
    for other, name in _RENAMED.items():
        value = given.pop(other, None)
        if given.get(name) is None and value is not None:
            given[name] = value
    for name, unset in _UNSET.items():
        if given.get(name) == unset and not isinstance(given[name], bool):
            del given[name]
    return given


def chat_parameters(body: Any) -> Any:
    """Return a body of chat completions with OpenAI's names, as `text_parameters` does."""
    given = text_parameters(body)
    if not isinstance(given, dict):
        return given
    _read_thinking(given)
    _read_functions(given)
    if given.get("tool_choice") == "any":
        given["tool_choice"] = "required"
    messages = given.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[-1], Mapping) and "prefix" in messages[-1]:
        last = dict(messages[-1])
        if last.pop("prefix") is True:
            given["continue_final_message"] = True
        given["messages"] = [*messages[:-1], last]
    return given


def _read_thinking(given: dict[str, Any]) -> None:
    """Translate the switches for reasoning: `thinking`, `enable_thinking`, and `reasoning` with its effort."""
    thinking, switch, reasoning = (given.pop(name, None) for name in ("thinking", "enable_thinking", "reasoning"))
    if isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "disabled", "auto", "adaptive"):
        switch = thinking["type"] != "disabled" if switch is None else switch
    elif thinking is not None:
        raise BadRequest(
            f"thinking: {short(thinking)} is not supported: use a type, enabled or disabled", param="thinking"
        )
    if switch is not None:
        kwargs = given.get("chat_template_kwargs")
        given["chat_template_kwargs"] = {"enable_thinking": switch, **(kwargs if isinstance(kwargs, Mapping) else {})}
    if isinstance(reasoning, Mapping) and given.get("reasoning_effort") is None:
        effort = "none" if reasoning.get("enabled") is False else reasoning.get("effort")
        if effort is not None:
            given["reasoning_effort"] = effort
        if reasoning.get("exclude") is True:
            given.setdefault("include_reasoning", False)


def _read_functions(given: dict[str, Any]) -> None:
    """Translate the form that tools had before: `functions` and `function_call`."""
    functions, call = given.pop("functions", None), given.pop("function_call", None)
    if functions is not None and given.get("tools") is None:
        if not isinstance(functions, list):
            raise BadRequest("functions: must be a list; better send tools", param="functions")
        given["tools"] = [{"type": "function", "function": function} for function in functions]
    if call is not None and given.get("tool_choice") is None:
        given["tool_choice"] = {"type": "function", "function": call} if isinstance(call, Mapping) else call
