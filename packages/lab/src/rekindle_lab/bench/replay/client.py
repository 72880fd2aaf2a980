"""Client of any OpenAI-compatible server: streamed chat completions with arrival times.

Owns which parameters a server is sent: those unknown to OpenAI's API go to Rekindle only. Server answers never raise
here: a failure is a value with a kind, because a benchmark counts failures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from rekindle.errors import ConfigError, RekindleError, RequestFailed
from rekindle.harness.http import connect, events

TIMEOUT_S = 600.0
START_S = 300.0  # a large model on a slow disk
KNOWN = frozenset(
    "messages model max_tokens max_completion_tokens temperature top_p n stop seed stream stream_options tools "
    "tool_choice parallel_tool_calls response_format logit_bias logprobs top_logprobs presence_penalty "
    "frequency_penalty user".split()
)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. Seconds count from when the request was sent; `token_s` has one entry per chunk of the reply.

    `error` is the kind of a failure ("http 503", "connection", "stream", "timeout"), None if the stream ended normally.
    `usage` and `report` (Rekindle's own object) are None if the server sends none.
    """

    text: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    token_s: tuple[float, ...] = ()
    total_s: float = 0.0
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    report: Mapping[str, Any] | None = None
    error: str | None = None
    problem: str = ""

    @property
    def first_token_s(self) -> float:
        """Seconds to the first chunk of the reply; to its end if it is empty."""
        return self.token_s[0] if self.token_s else self.total_s

    @property
    def prompt_tokens(self) -> int | None:
        """Prompt tokens as counted by the server, or None."""
        return None if self.usage is None else self.usage.get("prompt_tokens")

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens the server did not compute, or None if it does not report them."""
        details = (self.usage or {}).get("prompt_tokens_details") or {}
        return details.get("cached_tokens")

    @property
    def completion_tokens(self) -> int | None:
        """Completion tokens as counted by the server, or None."""
        return None if self.usage is None else self.usage.get("completion_tokens")

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message for the client's next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        return message | ({"tool_calls": [dict(call) for call in self.tool_calls]} if self.tool_calls else {})


@dataclass(slots=True)
class _Reading:
    """The received part of a stream."""

    started: float
    clock: Callable[[], float]
    texts: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    token_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    report: Mapping[str, Any] | None = None
    ended: bool = False
    problem: str = ""

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Process one event."""
        if chunk.get("error"):
            error = chunk["error"]
            self.problem = str(error.get("message", error) if isinstance(error, Mapping) else error)
            return
        self.usage = chunk.get("usage") or self.usage
        self.report = chunk.get("rekindle") or self.report
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) == 0:
                self._take_delta(choice.get("delta") or {})
                self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _take_delta(self, delta: Mapping[str, Any]) -> None:
        text, calls = delta.get("content"), delta.get("tool_calls")
        if text or calls or delta.get("reasoning_content") or delta.get("reasoning"):
            self.token_s.append(self.clock() - self.started)
        self.texts.append(text or "")
        for piece in calls or ():
            call = self.calls.setdefault(piece.get("index", 0), {"name": "", "arguments": "", "id": None})
            function = piece.get("function") or {}
            call["id"] = piece.get("id") or call["id"]
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""

    def answer(self) -> Answer:
        """Return the answer; a failure if the stream broke off."""
        calls = [
            {
                "id": call["id"] or f"call-{index}",
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for index, call in sorted(self.calls.items())
        ]
        whole = self.ended or self.finish_reason is not None
        return Answer(
            text="".join(self.texts),
            tool_calls=tuple(calls),
            token_s=tuple(self.token_s),
            total_s=self.clock() - self.started,
            finish_reason=self.finish_reason,
            usage=self.usage,
            report=self.report,
            error="stream" if self.problem or not whole else None,
            problem=self.problem or ("" if whole else "the stream broke off"),
        )


class OpenAIServer:
    """A server at a URL, with or without `/v1` at the end. `model` None: the first one it lists."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self._http = connect(f"{self.url.removesuffix('/v1')}/v1", api_key=api_key, timeout_s=TIMEOUT_S)
        self._model = model
        self._clock = clock
        self._sleep = sleep
        self.model = model or "default"
        self.is_rekindle = False

    def wait_answering(self, within_s: float = START_S) -> float:
        """Wait until the server lists its models, and return the seconds waited; RekindleError if it never does."""
        began = self._clock()
        while True:
            problem = self._look()
            if problem is None:
                return self._clock() - began
            if self._clock() - began > within_s:
                raise RekindleError(f"{self.url}/models does not answer: {problem}")
            self._sleep(0.05)

    def chat(
        self,
        body: Mapping[str, Any],
        *,
        headers: Mapping[str, str] | None = None,
        rekindle: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Stream an answer to its end. `rekindle` holds options that are sent only to a Rekindle server."""
        began = self._clock()
        reading = _Reading(began, self._clock)
        given = json.dumps(self._body(body, rekindle))  # ASCII, for unpaired surrogates
        recorded = httpx.Headers(headers, encoding="latin-1")
        try:
            with self._http.stream("POST", "/chat/completions", content=given, headers=recorded) as response:
                if response.status_code != 200:
                    kind, problem = f"http {response.status_code}", response.read()[:2000].decode(errors="replace")
                    return Answer(total_s=self._clock() - began, error=kind, problem=problem)
                for _, chunk in events(response):
                    if chunk is None:
                        reading.ended = True
                    elif isinstance(chunk, dict):
                        reading.take(chunk)
        except httpx.TimeoutException:
            return Answer(total_s=self._clock() - began, error="timeout", problem=f"no byte for {TIMEOUT_S:.0f} s")
        except (httpx.HTTPError, ValueError) as error:
            kind = "stream" if reading.token_s else "connection"
            return Answer(total_s=self._clock() - began, error=kind, problem=repr(error))
        return reading.answer()

    def count_tokens(self, body: Mapping[str, Any]) -> int:
        """Let the server compute a prompt and return its token count. RequestFailed if it does not report it."""
        given = {**body, "model": self.model, "max_tokens": 1}
        try:
            response = self._http.post("/chat/completions", content=json.dumps(given))
            if response.status_code != 200:
                raise RequestFailed(f"{self.url}: {response.status_code} {response.text[:2000]}")
            return int(response.json()["usage"]["prompt_tokens"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise RequestFailed(f"{self.url} does not say how many tokens a prompt has: {error!r}") from None

    def _body(self, body: Mapping[str, Any], rekindle: Mapping[str, Any] | None) -> dict[str, Any]:
        given = {name: value for name, value in body.items() if self.is_rekindle or name in KNOWN}
        options = {**(given.get("rekindle") or {}), **(rekindle or {})}
        given |= {"rekindle": options} if self.is_rekindle and options else {}
        return given | {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}

    def _look(self) -> str | None:
        try:
            response = self._http.get("/models")
            if response.status_code == 401:
                raise ConfigError(f"{self.url} wants an API key: name the variable that holds it (--api-key-env)")
            if response.status_code != 200:
                return f"status {response.status_code}"
            models = response.json()["data"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            return repr(error)
        self.is_rekindle = any(item.get("owned_by") == "rekindle" for item in models)
        self.model = self._model or (models[0]["id"] if models else "default")
        return None


def inter_token(answers: Sequence[Answer]) -> list[float]:
    """Return the seconds between chunks of the same reply."""
    return [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.token_s, answer.token_s[1:], strict=False)
    ]
