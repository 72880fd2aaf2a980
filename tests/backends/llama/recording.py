"""What a real llama-server answered to a front, and the states of its slots, for machines that have none.

`python -m tests.backends.llama.recording` records anew: it runs the llama-server that `LLAMA_SERVER` names with the
bundled model, has a front send it every request of `ASKED`, and saves a slot with each kind of rows.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from rekindle import pocket
from rekindle_lab.bench.engine.gguf_file import write_file
from rekindle_lab.bench.engine.gguf_model import contents
from tests.backends.llama.real_server import LlamaServer
from tests.needs import ROOT
from tests.server.conftest import Served
from tests.server.scripted import serving

FOLDER = ROOT / "tests" / "data" / "llama_server"
FILE = FOLDER / "exchanges.json"
CONTEXT = 1024
SLOT_IDS = [1, 300, 301, 302, 303, 304, 305]
SLOTS = {"f16": ("-fa", "on"), "f16-without-flash-attention": ("-fa", "off"), "q8_0": ("-ctk", "q8_0", "-ctv", "q8_0")}
SCHEMA = {"type": "object", "properties": {"room": {"enum": ["attic", "cellar"]}}, "required": ["room"]}
QUESTION = [{"role": "user", "content": "The key is in the attic. Where is the key?"}]
SLOT_REQUESTS: list[tuple[str, Any]] = [
    ("/completion", {"prompt": SLOT_IDS, "n_predict": 2, "id_slot": 1, "cache_prompt": False, "return_tokens": True}),
    ("/slots/1?action=save", {"filename": "kept"}),
    ("/slots/1?action=restore", {"filename": "kept"}),
    ("/slots/1?action=erase", {}),
    ("/slots/1?action=restore", {"filename": "missing"}),
    ("/slots/1?action=restore", {"filename": "../outside"}),
]
# What a front is asked, by name; replies of chats are greedy unless said otherwise.
ASKED: dict[str, dict[str, Any]] = {
    "reply": {},
    "one message more": {"messages": [*QUESTION, {"role": "assistant", "content": "In the attic."}, *QUESTION]},
    "probabilities": {"logprobs": True, "top_logprobs": 3},
    "drawn": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 7, "n": 2},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"300": -5}},
    "characters in several tokens": {"structured_outputs": {"choice": ["🙂é数🚀x привет"]}, "max_tokens": 40},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "room", "schema": SCHEMA}},
        "max_tokens": 40,
    },
    "grammar": {"structured_outputs": {"grammar": 'root ::= "attic" | "cellar"'}},
    "grammar that is none": {"structured_outputs": {"grammar": "root ::= nowhere"}},
    "without an end": {"ignore_eos": True, "max_tokens": 12},
    "stop": {"stop": [" "], "logprobs": True},
}


@dataclass
class Exchange:
    """A request, without what its headers say, and its answer; `asked` None: a GET."""

    path: str
    asked: Any
    status: int
    answer: str


def forms(answer: str) -> list[Any]:
    """The JSON values of an answer: one, or those of its events."""
    events = [line[6:] for line in answer.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in events or [answer]]


def is_part(made: Any, recorded: Any) -> bool:
    """Whether all fields of a value are in a recorded one, with values of the same kinds."""
    if isinstance(made, dict) and isinstance(recorded, dict):
        return all(name in recorded and is_part(value, recorded[name]) for name, value in made.items())
    if isinstance(made, list) and isinstance(recorded, list):
        return all(any(is_part(each, other) for other in recorded) for each in made)
    numbers = int, float
    return type(made) is type(recorded) or (type(made) in numbers and type(recorded) in numbers)


@dataclass
class Recording:
    """Exchanges, each of which is answered as often as it is asked for; `replies`: what the front said, by name."""

    exchanges: list[Exchange] = field(default_factory=list)
    replies: dict[str, Any] = field(default_factory=dict)
    strangers: list[Any] = field(default_factory=list)  # requests that were never recorded

    @classmethod
    def read(cls) -> Recording:
        """The one in the repository."""
        found = json.loads(FILE.read_text("utf-8"))
        return cls([Exchange(**each) for each in found["exchanges"]], found["replies"])

    def write(self) -> None:
        """Put it in the repository."""
        exchanges = ",\n".join(json.dumps(vars(each), ensure_ascii=False) for each in self.exchanges)
        replies = json.dumps(self.replies, ensure_ascii=False)
        FILE.write_text(f'{{"replies": {replies},\n"exchanges": [\n{exchanges}\n]}}\n', "utf-8")

    def find(self, path: str, asked: Any) -> Exchange | None:
        """The answer to a request; None, and noted, if it is not known."""
        found = next((each for each in self.exchanges if (each.path, each.asked) == (path, asked)), None)
        if found is None:
            self.strangers.append((path, asked))
        return found


@contextmanager
def replaying(recording: Recording, server: str | None = None) -> Iterator[str]:
    """The URL of a server that answers from a recording; with the URL of a `server`, what that answers is recorded."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Nothing is logged."""

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, asked: Any) -> None:
            found = recording.find(self.path, asked)
            if found is None and server is not None:
                method = "GET" if asked is None else "POST"
                answer = httpx.request(method, server + self.path, json=asked, timeout=60)
                found = Exchange(self.path, asked, answer.status_code, answer.content.decode())
                recording.exchanges.append(found)
            data = b"{}" if found is None else found.answer.encode()
            self.send_response(404 if found is None else found.status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_address[1]}"
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


@contextmanager
def fronted(url: str) -> Iterator[Served]:
    """A front of the llama-server there, with the bundled model."""
    with serving(model=str(pocket.model_dir()), store="off", backend=f"llama.cpp={url}") as front:
        yield front


def reply(front: Served, name: str) -> dict[str, Any]:
    """What a front says to one request of `ASKED`."""
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 10, "seed": 1, **ASKED[name]}
    body["rekindle"] = {"return_ids": True}
    answer = front.send("POST", "/v1/chat/completions", body)
    if answer.status != 200:
        return {"status": answer.status, "error": answer.error}
    choices = [
        {name: each[name] for name in ("message", "logprobs", "finish_reason")} for each in answer.json["choices"]
    ]
    reports = [each["rekindle"] for each in (answer.json, *answer.json["choices"]) if "rekindle" in each]
    return {"choices": choices, "usage": answer.json["usage"], "ids": [each["completion_ids"] for each in reports]}


def write_model(folder: Path, **more: int | str) -> Path:
    """The bundled model as a GGUF file, with more words in its header."""
    path = folder / "pocket.gguf"
    metadata, tensors = contents(pocket.model_dir(), path.stem, "f16")
    write_file(path, {**metadata, **more}, tensors)
    return path


def record(folder: Path) -> Recording:
    """Record every request of `ASKED` anew."""
    recording = Recording()
    with (
        LlamaServer(write_model(folder), folder, "-c", str(3 * CONTEXT), "--no-kv-unified") as server,
        replaying(recording, server.url) as url,
        fronted(url) as front,
    ):
        recording.replies = {name: reply(front, name) for name in ASKED}
        for path, asked in SLOT_REQUESTS:
            httpx.post(url + path, json=asked, timeout=60)
    for each in recording.exchanges:  # where the model was lies here alone
        each.answer = each.answer.replace(f"{folder}/", "")
    recording.strangers.clear()
    return recording


def save_slot(folder: Path, flags: tuple[str, ...]) -> bytes:
    """The state of a slot that has computed `SLOT_IDS`, and one token more."""
    with LlamaServer(write_model(folder), folder, "-c", str(3 * CONTEXT), "--no-kv-unified", *flags) as server:
        server.complete(SLOT_IDS, 2, slot=1)
        return server.save(1, "slot").read_bytes()


def main() -> None:
    """Record all of it into the repository."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder)).write()
        for name, flags in SLOTS.items():
            (FOLDER / f"{name}.bin").write_bytes(save_slot(Path(folder), flags))


if __name__ == "__main__":
    main()
