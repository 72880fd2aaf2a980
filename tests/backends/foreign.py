"""A server that is not ours and misbehaves as its script says: what a front has to bear."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Foreign:
    """Where it listens (empty: anywhere), and what it answers: a status, headers, the bytes of a body.

    `hangs`: after these bytes it says nothing more, until the other side closes. `repeats`: after them it says this
    again and again, until the other side closes. `models` and `first` are its list of models and what it answers to
    the first prompt, as text. `more`: its other models, as it lists them. `prompt_token_ids`: what it says a prompt
    was. With `props` it is a llama-server, which says this of itself,
    and whether it `drafts` (None: not said). `key`: what it wants of clients that ask for more
    than its models.
    """

    url: str = ""
    model: str = "scripted"
    max_model_len: int | None = 2048
    num_bytes: int = 1 << 20
    tokens: list[int] | None = None
    takes_ids: bool = True
    returns_ids: bool = True
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    hangs: bool = False
    repeats: bytes = b""
    models: str | None = None
    first: str | None = None
    more: list[dict[str, Any]] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    props: Mapping[str, Any] | None = None
    drafts: bool | None = False
    key: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)


def chunk(ids: list[int], reason: str | None = None, **more: Any) -> bytes:
    """One event of a stream of completions."""
    choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n".encode()


def usage(cached: int) -> bytes:
    """The last chunk, which says what was reused, and the end."""
    last = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}}
    return f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode()


def event(num_tokens: int, token_id: int, text: str = "?", **more: Any) -> bytes:
    """One event of llama-server's stream: a token, and how many there are with it; control tokens have no text."""
    said = {"content": text, "tokens": [token_id], "stop": False, "tokens_predicted": num_tokens, **more}
    return f"data: {json.dumps(said)}\n\n".encode()


def last_event(num_tokens: int, kind: str = "limit", cached: int = 0) -> bytes:
    """The last event of llama-server's stream."""
    said = {"content": "", "tokens": [], "stop": True, "tokens_predicted": num_tokens, "stop_type": kind}
    return f"data: {json.dumps(said | {'timings': {'cache_n': cached}})}\n\n".encode()


@contextmanager
def foreign(**more: Any) -> Iterator[Foreign]:
    """A running server."""
    state = Foreign(**more)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Nothing is logged."""

        def do_GET(self) -> None:
            if self.path == "/props":
                self._send(
                    200 if state.props else 404, {}, json.dumps(state.props).encode() if state.props else b"Not Found"
                )
                return
            if self.path == "/slots":
                drafts = [] if state.drafts is None else [{"id": 0, "speculative": state.drafts}]
                self._send(200 if drafts else 501, {}, json.dumps(drafts or {}).encode())
                return
            entry: dict[str, Any] = {"id": state.model, "object": "model"}
            if state.props is not None:
                entry["meta"] = {"n_ctx": state.max_model_len, "size": state.num_bytes}
            elif state.max_model_len is not None:
                entry["max_model_len"] = state.max_model_len
            listed = json.dumps({"data": [entry, *state.more]}) if state.models is None else state.models
            self._send(200, {}, listed.encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.keys.append(self.headers.get("Authorization"))
            if state.key is not None and state.keys[-1] != f"Bearer {state.key}":
                self._send(401, {}, b'{"error": {"message": "Invalid API Key"}}')
            elif self.path == "/tokenize":
                if state.tokens is None:
                    self._send(404, {}, b"{}")
                else:
                    tokens = state.tokens if state.props is None or "content" in body else []
                    self._send(200, {}, json.dumps({"tokens": tokens}).encode())
            elif not state.takes_ids and not isinstance(body["prompt"], str):
                self._send(404, {}, b'{"error": "text input must be of type `str`"}')  # mlx_lm.server 0.32
            elif not body.get("stream"):
                said = json.dumps(self._first(body["prompt"])) if state.first is None else state.first
                self._send(200, {}, said.encode())
            else:
                state.asked.append(body)
                self._stream()

        def _first(self, prompt: list[int]) -> dict[str, Any]:
            evaluated = prompt if state.prompt_token_ids is None else state.prompt_token_ids
            if self.path == "/completion":
                return {"tokens": [5] if state.returns_ids else [], "tokens_evaluated": len(evaluated)}
            choice: dict[str, Any] = {"token_ids": [5], "text": ""} if state.returns_ids else {"text": ""}
            asked = {} if state.prompt_token_ids is None else {"prompt_token_ids": state.prompt_token_ids}
            return {"choices": [choice | asked]}

        def _stream(self) -> None:
            if not state.hangs and not state.repeats:
                self._send(state.status, state.headers, state.body)
                return
            self.send_response(state.status)
            self.end_headers()
            self.wfile.write(state.body)
            self.wfile.flush()
            with contextlib.suppress(ConnectionError):
                while state.repeats:
                    self.wfile.write(state.repeats)
                    time.sleep(0.01)
            if state.repeats:
                state.left.set()
                return
            self.connection.settimeout(60)
            if not self.connection.recv(1):  # the other side has closed
                state.left.set()
            self.close_connection = True

        def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    port = int(state.url.rpartition(":")[2] or 0)
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
