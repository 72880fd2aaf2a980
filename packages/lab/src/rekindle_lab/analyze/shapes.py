"""Extraction of the request from one log entry, whatever wraps it.

Owns the keys under which loggers store bodies, headers, times, sessions and answers: bare bodies of OpenAI, Anthropic
and Ollama, batch files, LiteLLM, Helicone, Langfuse, OpenPipe, claude-trace and other logging proxies, HAR. Reads no
more of a body than it takes to distinguish the dialects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

Dialect = Literal["chat", "messages", "responses", "completions", "ollama"]
MAX_DEPTH = 6
BODIES = (
    "body",
    "request_body",
    "requestBody",
    "request",
    "params",  # Anthropic's batches
    "proxy_server_request",
    "postData",
    "text",
    "content",
    "payload",
    "input",
    "kwargs",
    "data",
)
# Keys of tools and other parameters that are logged next to the messages rather than in one body with them.
PARAMETERS = ("model_parameters", "modelParameters", "optional_params", "invocation_params", "parameters")
ANSWERS = ("response", "response_body", "responseBody", "output", "answer", "completion")
TIMES = (
    "startTime",
    "start_time",
    "startedDateTime",
    "request_created_at",
    "timestamp",
    "time",
    "ts",
    "created_at",
    "logged_at",
    "at",
)
SESSIONS = ("agent", "agent_id", "session_id", "sessionId", "litellm_session_id", "conversation_id", "thread_id")
SESSION_PROPERTIES = ("helicone-session-id", "session_id", "sessionid", "litellm_session_id")
PROPERTIES = ("metadata", "request_properties", "properties")
PLACES = ("url", "endpoint", "path", "request_path", "target")
_BLOCKS = frozenset(("tool_use", "tool_result", "thinking", "redacted_thinking", "image", "document"))


@dataclass(frozen=True, slots=True)
class Logged:
    """One logged request: its body and what its wrappers say. `at_s`: Unix seconds, None: unknown."""

    dialect: Dialect
    body: Mapping[str, Any]
    at_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    session: str | None = None
    answer: Any = None


@dataclass(slots=True)
class _Around:
    """What the wrappers say; the outermost takes precedence."""

    url: str = ""
    at_s: float | None = None
    session: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    answer: Any = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_wrapped: bool = False

    def note(self, value: Mapping[str, Any]) -> None:
        self.url = self.url or next((value[key] for key in PLACES if isinstance(value.get(key), str)), "")
        if self.at_s is None:
            self.at_s = next((at for key in TIMES if (at := moment(value.get(key))) is not None), None)
        self.session = self.session or _session(value)
        self.headers = self.headers or _headers(value.get("headers"))
        if self.answer is None:
            self.answer = next((value[key] for key in ANSWERS if value.get(key) not in (None, "", {}, [])), None)
        for key in PARAMETERS:
            found = parsed(value.get(key))
            self.parameters = self.parameters or (found if isinstance(found, Mapping) else {})


def read_entry(entry: Any) -> Logged | None:
    """Return the request of one entry; None if it holds none with a prompt."""
    around = _Around()
    body = _find(parsed(entry), around, MAX_DEPTH)
    if body is None:
        return None
    if any(key not in body and key in around.parameters for key in ("tools", "functions")):
        body = {**{key: around.parameters[key] for key in ("tools", "functions") if key in around.parameters}, **body}
    return Logged(_dialect(body, around), body, around.at_s, around.headers, around.session, parsed(around.answer))


def parsed(value: Any) -> Any:
    """Decode a string that holds a JSON object or list; return anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def moment(value: Any) -> float | None:
    """Return Unix seconds of a time as loggers write it: seconds, milli-, micro- or nanoseconds, or ISO 8601 (UTC)."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return _iso(value)
    if not isinstance(value, int | float) or not 0 < value < 1e20:
        return None
    for least, unit in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)):
        if value >= least:
            return value / unit
    return float(value)


def _iso(text: str) -> float | None:
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _find(value: Any, around: _Around, depth: int) -> Mapping[str, Any] | None:
    """Find the body somewhere in `value`, and note what its wrappers say."""
    if not isinstance(value, Mapping):
        return _as_chat(value) if around.is_wrapped else None
    if _is_body(value, around):
        around.note({key: item for key, item in value.items() if key not in ("metadata", "input")})
        around.parameters = {} if "tools" in value else around.parameters
        return value
    around.note(value)
    around.is_wrapped = True
    for key in BODIES:
        if value.get(key) and depth:
            found = _find(parsed(value[key]), around, depth - 1)
            if found is not None:
                return found
    return None


def _as_chat(value: Any) -> Mapping[str, Any] | None:
    """Wrap a bare list of messages, as tracers store it, in a body."""
    is_chat = isinstance(value, list) and bool(value) and all(isinstance(x, Mapping) and "role" in x for x in value)
    return {"messages": value} if is_chat else None


def _is_body(value: Mapping[str, Any], around: _Around) -> bool:
    if isinstance(value.get("messages"), list) and value["messages"]:
        return True
    if "model" not in value and not around.url:
        return False
    if isinstance(value.get("prompt"), str | list) and value["prompt"]:
        return True
    given = value.get("input")
    is_traced = any(key in value for key in (*ANSWERS, *TIMES))  # an observation: its input is a body or messages
    return bool(given) and isinstance(given, str | list) and not is_traced


def _dialect(body: Mapping[str, Any], around: _Around) -> Dialect:
    url = around.url.partition("?")[0].rstrip("/")
    if url.endswith(("/api/chat", "/api/generate")):
        return "ollama"
    if "messages" not in body:
        is_ollama = isinstance(body.get("options"), Mapping) and "prompt" in body
        return "responses" if "input" in body else "ollama" if is_ollama else "completions"
    if url.endswith("/messages"):
        return "messages"
    if url.endswith("/chat/completions"):
        return "chat"
    return "messages" if _looks_anthropic(body) else "ollama" if isinstance(body.get("options"), Mapping) else "chat"


def _looks_anthropic(body: Mapping[str, Any]) -> bool:
    if any(key in body for key in ("system", "anthropic_version", "stop_sequences", "thinking")):
        return True
    if any(isinstance(tool, Mapping) and "input_schema" in tool for tool in _items(body.get("tools"))):
        return True
    return any(block.get("type") in _BLOCKS for block in _content_blocks(body["messages"]))


def _content_blocks(messages: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        if isinstance(message, Mapping):
            yield from (block for block in _items(message.get("content")) if isinstance(block, Mapping))


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _session(value: Mapping[str, Any]) -> str | None:
    """Return the name of the conversation, if the logger stores one."""
    for key in SESSIONS:
        if isinstance(value.get(key), str) and value[key]:
            return str(value[key])
    for name in PROPERTIES:
        properties = parsed(value.get(name))
        if isinstance(properties, Mapping):
            for key, item in properties.items():
                if str(key).lower() in SESSION_PROPERTIES and isinstance(item, str) and item:
                    return item
    return None


def _headers(value: Any) -> dict[str, str]:
    """Return headers by lower-case name, from an object or from pairs as HAR and mitmproxy write them."""
    value = parsed(value)
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        pairs = [pair for item in _items(value) if (pair := _pair(item)) is not None]
    return {str(name).lower(): str(item[0] if isinstance(item, list) and item else item) for name, item in pairs}


def _pair(item: Any) -> tuple[Any, Any] | None:
    if isinstance(item, Mapping) and "name" in item and "value" in item:
        return item["name"], item["value"]
    return (item[0], item[1]) if isinstance(item, list) and len(item) == 2 else None


def usage_of(answer: Any) -> tuple[int, int] | None:
    """Return prompt tokens and how many were read from a cache, as the logged answer reports; None: it does not."""
    usage = _usage_in(answer, 2)
    if usage is None:
        return None
    if "prompt_tokens" in usage:
        return _number(usage["prompt_tokens"]), _number(_inner(usage, "prompt_tokens_details").get("cached_tokens"))
    if "input_tokens_details" in usage:
        return _number(usage.get("input_tokens")), _number(_inner(usage, "input_tokens_details").get("cached_tokens"))
    read = _number(usage.get("cache_read_input_tokens"))
    return _number(usage.get("input_tokens")) + read + _number(usage.get("cache_creation_input_tokens")), read


def _usage_in(answer: Any, depth: int) -> Mapping[str, Any] | None:
    """Find the `usage` of an answer, of the body inside it, or of stream events, where later ones complete it."""
    if isinstance(answer, str) and answer.startswith(("data:", "event:")):
        usage: dict[str, Any] = {}
        for line in answer.splitlines():
            event = parsed(line.removeprefix("data:")) if line.startswith("data:") else None
            for value in (event, _inner(event, "message"), _inner(event, "response")):
                usage.update({key: item for key, item in _inner(value, "usage").items() if item is not None})
        return usage or None
    if not isinstance(answer, Mapping):
        return None
    if isinstance(answer.get("usage"), Mapping):
        found: Mapping[str, Any] = answer["usage"]
        return found
    inner = next((answer[key] for key in ("body", "body_raw", "content", "text") if answer.get(key)), None)
    return _usage_in(parsed(inner), depth - 1) if depth else None


def _inner(value: Any, name: str) -> Mapping[str, Any]:
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and value > 0 else 0
