"""A coding agent's client of /v1/messages: identity headers, streamed answers, and idle time.

Speaks Anthropic's dialect, but for prompts of ids. Knows no conversation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.errors import RequestFailed
from rekindle.harness.client import Client
from rekindle.harness.http import events

PATH = "/v1/messages"
POLL_S = 0.01
MOST_IDLE_S = 60.0
Block = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a request: a session, and in it the main agent (`agent` None) or a sub-agent with its parent."""

    session: str
    agent: str | None = None
    parent: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers as the client sends them."""
        given = {
            "x-claude-code-session-id": self.session,
            "x-claude-code-agent-id": self.agent,
            "x-claude-code-parent-agent-id": self.parent,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass(slots=True)
class Heard:
    """One answer: content blocks, stop reason, usage, the `rekindle` object, seconds to its first content."""

    content: list[Block] = field(default_factory=list)
    stop_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    first_s: float = 0.0

    @property
    def calls(self) -> list[Block]:
        """The tool calls."""
        return [block for block in self.content if block["type"] == "tool_use"]

    @property
    def text(self) -> str:
        """The text."""
        return "".join(block["text"] for block in self.content if block["type"] == "text")

    def words(self) -> list[tuple[str, Any]]:
        """Return the content without ids and signatures, for comparison."""
        keys = {"thinking": ("thinking",), "text": ("text",), "tool_use": ("name", "input")}
        return [(block["type"], *(block[key] for key in keys[block["type"]])) for block in self.content]


class MessagesClient:
    """Client of one server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def ask(self, body: Mapping[str, Any], identity: Identity) -> Heard:
        """Stream an answer to its end; RequestFailed with the server's error."""
        heard, arguments, started = Heard(), dict[int, str](), time.perf_counter()
        headers = {**identity.headers, "anthropic-version": "2023-06-01", "x-app": "cli"}
        with self._client.send("POST", PATH, {**body, "stream": True}, headers) as response:
            for _, event in events(response):
                _take(heard, event, arguments, started)
        if heard.stop_reason is None:
            raise RequestFailed("the stream ended before the answer did")
        return heard

    def complete(self, ids: Sequence[int], max_tokens: int) -> Heard:
        """Return the reply to a prompt of ids, computed without reuse, as ids in its report."""
        options = {"reuse": "off", "return_ids": True}
        body = {"prompt": list(ids), "max_tokens": max_tokens, "temperature": 0, "rekindle": options}
        with self._client.send("POST", "/v1/completions", body, {}) as response:
            return Heard(report=json.loads(response.read())["rekindle"])

    def wait_until_idle(self) -> float:
        """Wait until the server is idle; return the seconds waited."""
        started = time.perf_counter()
        while time.perf_counter() - started < MOST_IDLE_S:
            stats = self._client.json("GET", "/v1/stats")
            if not any(stats[name] for name in ("num_running", "num_waiting", "num_background")):
                return time.perf_counter() - started
            time.sleep(POLL_S)
        raise RequestFailed(f"the server was still busy after {MOST_IDLE_S:.0f} s")

    def stats(self) -> dict[str, Any]:
        """Return the server's stats."""
        found: dict[str, Any] = self._client.json("GET", "/v1/stats")
        return found


def _take(heard: Heard, event: dict[str, Any], arguments: dict[int, str], started: float) -> None:
    """Process one event; `arguments` holds the JSON of unfinished calls by block."""
    kind = event["type"]
    heard.report |= event.get("rekindle") or event.get("message", {}).get("rekindle") or {}
    if kind == "error":
        raise RequestFailed(event["error"]["message"])
    if kind == "message_start":
        heard.usage = dict(event["message"]["usage"])
    elif kind == "content_block_start":
        heard.first_s = heard.first_s or time.perf_counter() - started
        heard.content.append(dict(event["content_block"]))
    elif kind == "content_block_delta":
        _add(heard.content[event["index"]], event["delta"], event["index"], arguments)
    elif kind == "content_block_stop" and event["index"] in arguments:
        heard.content[event["index"]]["input"] = json.loads(arguments[event["index"]] or "{}")
    elif kind == "message_delta":
        heard.stop_reason = event["delta"]["stop_reason"]
        heard.usage |= event["usage"]


def _add(block: Block, delta: dict[str, Any], index: int, arguments: dict[int, str]) -> None:
    if delta["type"] == "input_json_delta":
        arguments[index] = arguments.get(index, "") + delta["partial_json"]
        return
    name = delta["type"].removesuffix("_delta")
    block[name] = block.get(name, "") + delta[name]
