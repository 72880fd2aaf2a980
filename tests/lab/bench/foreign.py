"""A small OpenAI-compatible server that is not ours: what it was sent, and answers with whatever flaw a test wants."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Mapping[str, Any]  # content or tool_calls; status and error for a failure; usage; breaks_off


@dataclass
class Foreign:
    """What came in, in order; `reply` decides what goes out. A barrier makes so many requests wait for each other."""

    reply: Callable[[dict[str, Any]], Reply]
    key: str | None = None
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def text(content: str, **more: Any) -> Reply:
    return {"content": content, **more}


@contextmanager
def foreign_server(reply: Callable[[dict[str, Any]], Reply], *, key: str | None = None) -> Iterator[Foreign]:
    foreign = Foreign(reply, key)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            return

        def do_GET(self) -> None:
            if foreign.key is not None and self.headers["Authorization"] != f"Bearer {foreign.key}":
                self._json(401, {"error": {"message": "a key is wanted"}})
            else:
                self._json(200, {"object": "list", "data": [{"id": "other-model", "owned_by": "somebody"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with foreign.lock:
                foreign.bodies.append(body)
                foreign.headers.append({name.lower(): value for name, value in self.headers.items()})
                foreign.num_running += 1
                foreign.most_running = max(foreign.most_running, foreign.num_running)
            try:
                self._answer(body, foreign.reply(body))
            finally:
                with foreign.lock:
                    foreign.num_running -= 1

        def _answer(self, body: dict[str, Any], reply: Reply) -> None:
            if "status" in reply:
                self._json(reply["status"], {"error": {"message": reply["error"]}})
            elif body.get("stream"):
                self._stream(reply)
            else:
                words = sum(len(str(message["content"]).split()) for message in body["messages"])
                self._json(200, {"usage": {"prompt_tokens": 4 + 2 * words}, "choices": []})

        def _stream(self, reply: Reply) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            for word in re.findall(r" ?[^ ]+", reply.get("content", "")):
                self._event({"choices": [{"index": 0, "delta": {"content": word}}]})
            for index, (name, arguments) in enumerate(reply.get("calls", ())):
                head = {"index": index, "id": f"own-{index}", "type": "function", "function": {"name": name}}
                self._event({"choices": [{"index": 0, "delta": {"tool_calls": [head]}}]})
                for piece in (arguments[:3], arguments[3:]):
                    call = {"index": index, "function": {"arguments": piece}}
                    self._event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
            if reply.get("breaks_off"):
                return
            if "says" in reply:
                self._event({"error": {"message": reply["says"]}})
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            if "usage" in reply:
                self._event({"choices": [], "usage": reply["usage"]})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, chunk: Any) -> None:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        def _json(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    foreign.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield foreign
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
