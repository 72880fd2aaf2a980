"""Record an answer of every route: `python -m tools.answers > before.json`, and again after a refactoring.

A server with the bundled model runs in this process, with a store of its own, and gets the same requests in the same
order, good and bad ones, whole and streamed. What differs from run to run (ids, times, versions, memory) is replaced by
its kind, so that two recordings of code that answers alike are equal byte by byte. Every operation of /openapi.json is
called at least once.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx

from rekindle import Engine
from rekindle.server.app import create_app

SAMPLING = {"temperature": 0, "max_tokens": 8}
TALK = [{"role": "user", "content": "Remember that the copper key is in the attic."}]
OLLAMA = {"model": "pocket", "options": {"temperature": 0, "num_predict": 8}}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
ROUTES = "/v1/coordination/sessions"
# Fields whose values differ from run to run, or with the version and the machine; and texts that hold such.
VOLATILE = re.compile(
    r"(_ms|_at|_s|_bytes|_ns)$|^(id|object_id|at|created|started|process|modified_at|created_at|completed_at|last_use|last_used"
    r"|used|uptime|pid|version|versions|fingerprint|digest|size|session|previous_response_id|response_id|item_id"
    r"|total_duration|load_duration|prompt_eval_duration|eval_duration|system_fingerprint|request_id|started_s"
    r"|call_id|tool_use_id|steps|obfuscation)$"
)
# In sessions agents also listen and speak at once: what was reused, and the order of events, depends on the moment.
MOMENTARY = re.compile(r"_tokens$|_share$|^(gap|layout|num_entries|cached|explanation|outcome|reuse|source)$")
IDS = re.compile(r"\b(chatcmpl|cmpl|resp|msg|sess|call|toolu|req|fc|rs|item)[-_][0-9A-Za-z]{6,}")


@dataclass(frozen=True)
class Request:
    """One request; `{session}` and `{response}` in a path are ids that were answered before."""

    method: str
    path: str
    body: Any = None
    agent: str | None = None


def chat(agent: str | None = "ada", **more: Any) -> Request:
    """A chat completion."""
    return Request("POST", "/v1/chat/completions", {"messages": TALK, **SAMPLING, **more}, agent)


def requests() -> Iterator[Request]:
    """All requests, in order."""
    yield from (chat(), chat(), chat("bob", stream=True, stream_options={"include_usage": True}))
    yield from (chat(n=2, temperature=1, seed=3), chat(None, logprobs=True, top_logprobs=2), chat(tools=[TOOL]))
    yield chat("cy", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}})
    yield chat(tools=[TOOL], tool_choice="required", max_tokens=64)
    for bad in ({"temperature": -1}, {"n": 99}, {"messages": []}, {"unknown": 1}, {"max_tokens": -1}):
        yield chat(**bad)
    text = {"prompt": "The copper key", **SAMPLING}
    yield from (Request("POST", "/v1/completions", {**text, **more}) for more in ({}, {"stream": True}, {"echo": True}))
    answer = {"input": "Where is the key?", "max_output_tokens": 8, "temperature": 0}
    yield Request("POST", "/v1/responses", answer, "ada")
    yield Request("POST", "/v1/responses", {**answer, "stream": True})
    for path in ("{response}", "{response}/input_items", "resp_none"):
        yield Request("GET", f"/v1/responses/{path}")
    yield Request("POST", "/v1/responses/input_tokens", {"input": "Where is the key?"})
    message = {"model": "pocket", "messages": TALK, **SAMPLING}
    yield from (Request("POST", "/v1/messages", {**message, **more}) for more in ({}, {"stream": True}, {"top_p": 7}))
    yield Request("POST", "/v1/messages/count_tokens", {"model": "pocket", "messages": TALK})
    for stream in (False, True):
        yield Request("POST", "/api/chat", {**OLLAMA, "messages": TALK, "stream": stream})
        yield Request("POST", "/api/generate", {**OLLAMA, "prompt": "The copper key", "stream": stream})
    yield from agents()
    yield from sessions()
    for path in ("/v1/models", "/v1/models/pocket", "/v1/models/none", "/api/tags", "/api/ps", "/api/version"):
        yield Request("GET", path)
    for path in ("/overview", "/v1/stats", "/health/live", "/health/ready", "/version", "/tokenizer_info", "/nowhere"):
        yield Request("GET", path)
    yield Request("POST", "/api/show", {"model": "pocket"})
    for path in ("/v1/tokenize", "/tokenize"):
        yield Request("POST", path, {"prompt": "The copper key"})
    yield Request("POST", "/detokenize", {"tokens": [5, 6, 7]})
    yield Request("DELETE", "/v1/responses/{response}")


def agents() -> Iterator[Request]:
    """Of agents."""
    yield from (Request("GET", "/v1/agents"), Request("GET", "/v1/agents/ada"), Request("GET", "/v1/agents/none"))
    yield from (Request("GET", "/v1/agents/ada/why"), Request("POST", "/v1/agents/ada/pin", {"for_s": 600}))
    yield Request("DELETE", "/v1/agents/ada/pin")
    yield Request("POST", "/v1/agents/ada/fork", {"target": "eve"})
    yield Request("POST", "/v1/agents/eve/rewind", {"turns": 1})
    yield Request("POST", "/v1/agents/dan/prefill", {"messages": TALK})
    yield from (Request("POST", f"/v1/agents/ada/{verb}") for verb in ("offload", "load"))
    yield from (Request("DELETE", "/v1/agents/eve"), Request("POST", "/v1/agents/dan/purge"))


def sessions() -> Iterator[Request]:
    """Of sessions."""
    plan = {"agents": [{"name": "Ada"}, {"name": "Bo"}], "setting": "A harbour.", "sampling": SAMPLING}
    yield from (Request("POST", ROUTES, plan), Request("GET", ROUTES), Request("GET", f"{ROUTES}/none"))
    one = f"{ROUTES}/{{session}}"
    for verb in ("turn", "turn/stream", "round", "round/stream"):
        yield Request("POST", f"{one}/{verb}")
    vote = {"question": "Where?", "options": ["pier", "barge"], "sampling": SAMPLING}
    yield from (Request("POST", f"{one}/{verb}", vote) for verb in ("vote", "vote/stream"))
    yield from (Request("POST", f"{one}/{verb}", {"text": "Hm.", "to": ["Bo"]}) for verb in ("messages", "whisper"))
    yield Request("POST", f"{one}/interrupt", {"text": "Stop."})
    yield from (Request("GET", one), Request("GET", f"{one}/messages"))
    yield Request("POST", f"{one}/agents/Ada/fork", {"target": "Ada II"})
    yield Request("POST", f"{one}/agents/Bo/rewind", {"turns": 1})
    yield Request("POST", f"{one}/agents/Ada%20II/merge", {"source": "Bo"})
    yield from (Request("GET", f"{one}/compare?agents=Ada,Bo"), Request("DELETE", one))


def steady(value: Any, *, numbers: bool = True) -> Any:
    """A value with everything that differs between runs replaced by its kind; `numbers`: whether these are kept."""
    if isinstance(value, dict):
        return {
            key: f"<{type(inner).__name__}>"
            if VOLATILE.search(key) and not isinstance(inner, dict | list)
            else steady(inner, numbers=numbers)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [steady(inner, numbers=numbers) for inner in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if numbers else "<number>"
    return IDS.sub(r"<\1>", value) if isinstance(value, str) else value


def settled(value: Any) -> Any:
    """A value without the fields that depend on the moment."""
    if isinstance(value, dict):
        return {key: settled(inner) for key, inner in value.items() if not MOMENTARY.search(key)}
    return [settled(inner) for inner in value] if isinstance(value, list) else value


def recorded(path: str, response: httpx.Response) -> Any:
    """The body: JSON, the data of events, or JSON lines."""
    kind, is_session = response.headers.get("content-type", "").partition(";")[0], path.startswith(ROUTES)
    if kind == "application/json":
        body = steady(response.json(), numbers=path != "/v1/stats")
        return settled(body) if is_session else body
    if kind == "text/event-stream":
        events = [steady(json.loads(line[6:])) for line in response.text.splitlines() if line.startswith("data: {")]
        return sorted(map(settled, events), key=json.dumps) if is_session else events
    if kind == "application/x-ndjson":
        return [steady(json.loads(line)) for line in response.text.splitlines()]
    return response.text


async def record(app: Any, engine: Engine) -> list[Any]:
    """Send all requests to an application, each once all before it is on disk."""
    found, known = [], {"session": "", "response": ""}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:
        for request in requests():
            path = request.path.format(**known)
            await asyncio.to_thread(engine.flush)
            headers = {"X-Agent-ID": request.agent} if request.agent else {}
            answer = await client.request(request.method, path, json=request.body, headers=headers)
            body = recorded(path, answer)
            if answer.status_code == 200 and request.method == "POST" and request.path in (ROUTES, "/v1/responses"):
                kind = "session" if request.path == ROUTES else "response"
                known[kind] = known[kind] or answer.json()["id"]
            found.append({"request": f"{request.method} {request.path}", "status": answer.status_code, "body": body})
        schema = (await client.get("/openapi.json")).json()
        called = [each["request"].partition("?")[0] for each in found]
        left = {each for each in operations(schema) if not any(re.fullmatch(pattern(each), one) for one in called)}
        print(f"{len(found)} answers; operations without one: {sorted(left) or 'none'}", file=sys.stderr)
        found.append({"request": "GET /openapi.json", "body": steady_schema(schema)})
    return found


def operations(schema: Any) -> Iterator[str]:
    """Method and path of every operation but the endless stream of a session's events, and texts of no fixed form."""
    for path, methods in schema["paths"].items():
        if not path.endswith(("/events", "/metrics")):
            yield from (f"{method.upper()} {path}" for method in methods)


def pattern(operation: str) -> str:
    """A regular expression of the requests that call an operation."""
    return re.sub(r"\\{\w+\\}", "[^/]+", re.escape(operation))


def steady_schema(schema: Any) -> Any:
    """The description, without the version."""
    return {**schema, "info": {**schema["info"], "version": "<str>"}}


def main() -> None:
    """Record, and print as JSON."""
    with tempfile.TemporaryDirectory() as store:
        engine = Engine.from_pretrained(store=store, threads=1, hot_bytes="64MiB")
        with engine, closing(create_app(engine, engine.settings.server)) as app:
            print(json.dumps(asyncio.run(record(app, engine)), indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
