"""Logged bodies without what this server refuses or what is not part of a prompt.

A log was written for another server. Parameters that do not reach the prompt and tools that the provider runs are
removed, a picture or document becomes a line with its digest, and older forms of calls become current ones. The rest
goes to the parsers that serve such bodies, so there is one reading of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.server.answers.options import EFFORTS
from rekindle.text.messages import KNOWN_KEYS, TEXT_PARTS


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Prune a body of OpenAI's chat completions."""
    tools = body.get("tools") or [{"type": "function", "function": each} for each in body.get("functions") or ()]
    functions = [tool for tool in tools if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping)]
    pruned = {
        "messages": [chat_message(message) for message in body["messages"]],
        "tools": [tool for tool in functions if tool["function"].get("name")] or None,
        "chat_template_kwargs": body.get("chat_template_kwargs"),
    }
    effort = body.get("reasoning_effort")
    return pruned | ({"reasoning_effort": effort} if effort in EFFORTS else {})


def chat_message(message: Any) -> Any:
    """Prune one chat message to text parts only."""
    if not isinstance(message, Mapping):
        return message
    kept = {key: item for key, item in message.items() if key in KNOWN_KEYS}
    kept["content"] = _parts(message.get("content"), TEXT_PARTS)
    if message.get("role") == "function":
        kept["role"] = "tool"
    if isinstance(message.get("function_call"), Mapping):  # the form before tool_calls
        kept["tool_calls"] = [{"type": "function", "function": message["function_call"]}]
    if kept.get("tool_calls"):
        kept["tool_calls"] = [call for call in kept["tool_calls"] if _named(call)]
    for key in ("reasoning_content", "reasoning", "thinking", "name", "tool_call_id"):
        if not isinstance(kept.get(key), str | None):
            del kept[key]
    return kept


def _named(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _parts(content: Any, kinds: Sequence[str]) -> Any:
    """Return content whose parts are all text."""
    if not isinstance(content, list):
        return content
    return [part if _is_text(part, kinds) else {"type": "text", "text": _placeholder(part)} for part in content]


def _is_text(part: Any, kinds: Sequence[str]) -> bool:
    if isinstance(part, str):
        return True
    return isinstance(part, Mapping) and part.get("type", "text") in kinds and isinstance(part.get("text"), str)


def _placeholder(part: Any) -> str:
    """Return a line that stands for a part that is not text; equal parts give equal lines."""
    kind = part.get("type", "part") if isinstance(part, Mapping) else "part"
    digest = hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=6).hexdigest()
    return f"[{kind} {digest}]"


def ollama_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body of Ollama's as one of chat completions, or of completions if its prompt is the model's input."""
    if body.get("raw") and "messages" not in body:
        return {"prompt": body["prompt"]}
    messages = body.get("messages")
    if messages is None:
        head = [{"role": "system", "content": body["system"]}] if body.get("system") else []
        messages = [*head, {"role": "user", "content": body["prompt"], "images": body.get("images")}]
    think = body.get("think")
    return chat_body(
        {
            "messages": [_ollama_message(message) for message in messages],
            "tools": body.get("tools"),
            "chat_template_kwargs": None if think is None else {"enable_thinking": bool(think)},
            "reasoning_effort": think if isinstance(think, str) else None,
        }
    )


def _ollama_message(message: Any) -> Any:
    """Return a message with its pictures among its parts and the name of its tool as its own."""
    if not isinstance(message, Mapping):
        return message
    changed = {**message, "name": message.get("name") or message.get("tool_name")}
    if isinstance(message.get("images"), list):
        texts = [message["content"]] if isinstance(message.get("content"), str) else []
        changed["content"] = [*({"type": "image", "data": each} for each in message["images"]), *texts]
    return changed | ({"role": message["role"].lower()} if isinstance(message.get("role"), str) else {})


def messages_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Prune a body of Anthropic's messages, without cache breakpoints."""
    system, thinking = body.get("system"), body.get("thinking")
    kind = thinking.get("type") if isinstance(thinking, Mapping) else None
    return {
        "messages": [messages_message(message) for message in body["messages"] if isinstance(message, Mapping)],
        "system": [_block(block, "system") for block in system] if isinstance(system, list) else system,
        "tools": _anthropic_tools(body.get("tools")) or None,
        "thinking": {"type": kind} if kind in ("enabled", "disabled", "adaptive") else None,
    }


def _anthropic_tools(tools: Any) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, Mapping) and isinstance(tool.get("input_schema"), dict) and tool.get("name"):
            keys = ("name", "description", "input_schema", "input_examples")
            found[str(tool["name"])] = {key: tool[key] for key in keys if tool.get(key)} | {
                "input_schema": tool["input_schema"]
            }
    return list(found.values())


def messages_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Prune one message of Anthropic's."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        content = [_block(block, str(role)) for block in content if not _is_unreadable_reasoning(block)]
    return {"role": role, "content": content}


def _is_unreadable_reasoning(block: Any) -> bool:
    """Whether a block is reasoning that is redacted or reduced to its signature."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    return kind == "redacted_thinking" or (kind == "thinking" and not block.get("thinking"))


def _block(block: Any, role: str) -> dict[str, Any]:
    """Prune a block to what reaches the prompt, without cache breakpoints."""
    kind = block.get("type", "text") if isinstance(block, Mapping) else None
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    if role == "user" and kind == "tool_result" and isinstance(block.get("tool_use_id"), str):
        content = block.get("content")
        content = [_block(each, "tool") for each in content] if isinstance(content, list) else content
        return {
            "type": kind,
            "tool_use_id": block["tool_use_id"],
            "content": content,
            "is_error": block.get("is_error"),
        }
    if role == "assistant" and kind == "tool_use" and isinstance(block.get("input"), Mapping):
        return {key: block.get(key) for key in ("type", "id", "name", "input")}
    if role == "assistant" and kind == "thinking":
        return {"type": kind, "thinking": block["thinking"]}
    return {"type": "text", "text": _placeholder(block)}


def responses_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Prune a body of OpenAI's responses."""
    given, reasoning = body.get("input"), body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, Mapping) else None
    tools = [tool for tool in body.get("tools") or () if isinstance(tool, Mapping) and tool.get("type") == "function"]
    return {
        "input": response_items(given) if isinstance(given, list) else given,
        "instructions": body.get("instructions") if isinstance(body.get("instructions"), str) else None,
        "previous_response_id": body.get("previous_response_id"),
        "tools": [tool for tool in tools if tool.get("name")] or None,
        "reasoning": {"effort": effort} if effort in EFFORTS else None,
    }


def response_items(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Prune items to the kinds that are served; calls of other kinds become function calls."""
    found = []
    for item in items:
        if not isinstance(item, Mapping):
            continue
        kind = item.get("type") or ("message" if "role" in item else "")
        if kind == "message":
            found.append({"type": kind, "role": item.get("role"), "content": _parts(item.get("content"), TEXT_PARTS)})
        elif kind == "reasoning":
            parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
            texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
            found += [{"type": kind, "content": [{"type": "reasoning_text", "text": text} for text in texts]}] * bool(
                texts
            )
        elif str(kind).endswith("_call_output"):
            output = _parts(item.get("output"), TEXT_PARTS)
            output = output if isinstance(output, str | list) else json.dumps(output)
            found.append({"type": "function_call_output", "call_id": item.get("call_id"), "output": output})
        elif str(kind).endswith("_call") and isinstance(item.get("call_id"), str):
            found.append(_call_item(item))
    return found


def _call_item(item: Mapping[str, Any]) -> dict[str, Any]:
    given = next((item[key] for key in ("arguments", "input", "action") if item.get(key) is not None), "{}")
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    name = item.get("name") or str(item["type"]).removesuffix("_call")
    return {"type": "function_call", "call_id": item["call_id"], "name": name, "arguments": arguments}


def first_prompt(prompt: Any) -> Any:
    """Return the first of a completion's prompts."""
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return prompt[0] if several else prompt
