"""An imitation of llama-server, as a command: its endpoints and its slot files, with rows that follow from the tokens.

A row is a digest of all tokens up to its own, and the next token is a digest of all rows that it sees, so that one
wrong row in a restored slot makes another reply than `reply` says. Like the original it obeys `id_slot`, keeps what a
slot has in common with a prompt, needs one row more than a window to reuse any of it, and aborts on a file that is cut.

Before the end of a prompt it keeps a checkpoint: the state, and the rows that a window sees. With a state it goes on
from its last token or a checkpoint alone, with a window from there as well where the rows before were used again.

    IMITATION_WINDOW    tokens that a window sees, of a model with windows; else it has full attention alone
    IMITATION_STATE     "with rows" or "alone": a model with recurrent layers, the others of which have rows, or none
    IMITATION_VERSION   the version that its slot files have, of which it reads 4 alone
    IMITATION_TOKEN_S   seconds for each token of a reply
    IMITATION_FLAGS     a text of which rows depend, as they do of some flags of the original
    IMITATION_WORD      the word that /props has for the process, or a file that has it, otherwise drawn at each start
    IMITATION_BESIDE    what a slot computes while another one does has other rows: "same", the same other ones each
                        time; "drawn", others each time
    IMITATION_LOG       a file to which a line is added for each request: slot, tokens computed, tokens reused; those
                        that want no reply are in one of their own, whose name ends in ".back"
    IMITATION_SAVES     a file to which a line is added for each slot that is saved: slot, how many others compute
    IMITATION_ENDS      how often a reply ends by itself
    IMITATION_STUCK     set if slots keep no checkpoints
    IMITATION_USELESS   while there is a file of this name, what is restored is not there afterwards
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import secrets
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from rekindle import pocket

WINDOW = 96  # of the model in tests, where it has one
WIDTH, LAYERS = 32, 2  # bytes of K and of V of a layer
FLAGS = os.environ.get("IMITATION_FLAGS", "").encode()
STATES = (24, 300)  # bytes of the tensors of a state
CHECKPOINT = 4  # tokens before the end of a prompt
SPARE = 256  # rows of a window that a slot has room for, in addition to those that are seen
END = 0.04  # how often a reply ends by itself


def row(before: bytes, token: int, beside: bytes = b"") -> bytes:
    """K of the first layer at a token, of which all of its rows follow; `before`: that at the token before."""
    return hashlib.blake2b(before + struct.pack("<i", token) + beside, digest_size=WIDTH, key=FLAGS).digest()


def rows_of(first: bytes) -> np.ndarray:
    """The rows [layers, K and V, width] at a position."""
    found = [[first, bytes(WIDTH)], [hashlib.blake2b(first, digest_size=WIDTH, salt=b"layer").digest(), first]]
    return np.frombuffer(b"".join(each for layer in found for each in layer), np.uint8).reshape(LAYERS, 2, WIDTH)


def state_after(before: bytes, token: int) -> bytes:
    """The state after a token, of which the one after the next token follows."""
    return hashlib.shake_128(b"state" + before + struct.pack("<i", token)).digest(sum(STATES))


@dataclass
class Cells:
    """What a slot has of one memory: rows [layers, K and V, width] by position."""

    rows: dict[int, np.ndarray] = field(default_factory=dict)

    def seen(self, end: int, window: int | None) -> bytes:
        """The bytes of all rows that the token at `end` sees; KeyError if one is missing."""
        first = 0 if window is None else max(0, end - (window - 1))
        return b"".join(self.rows[at].tobytes() for at in range(first, end))


class Model:
    """Draws the next token from rows; ids are those of `words`, or the end."""

    def __init__(
        self, words: Sequence[int], end: int, window: int | None, state: str | None = None, ends: float = END
    ) -> None:
        self.words, self.end, self.window, self.state, self.ends = words, end, window, state, ends

    def next(self, slot: Slot, seed: int = 0) -> int:
        at = len(slot.tokens)
        seen = b"" if self.state == "alone" else slot.full.seen(at, None)
        digest = hashlib.blake2b(seen, digest_size=16, salt=seed.to_bytes(4, "little"))
        if self.window is not None:
            digest.update(slot.windowed.seen(at, self.window))
        if self.state is not None:
            digest.update(slot.state)
        number = int.from_bytes(digest.digest(), "little")
        return self.end if number % 10_000 < 10_000 * self.ends else self.words[number // 10_000 % len(self.words)]


def reply(model: Model, ids: Sequence[int], most: int) -> list[int]:
    """What follows a prompt, computed without any memory; the end is part of it."""
    slot = Slot()
    slot.compute(ids, 0)
    drawn: list[int] = []
    while len(drawn) < most:
        drawn.append(model.next(slot))
        if drawn[-1] == model.end:
            break
        slot.compute([*slot.tokens, drawn[-1]], len(slot.tokens))
    return drawn


@dataclass
class Slot:
    """The tokens of a slot, their rows, the state after them, and earlier states by the number of tokens."""

    tokens: list[int] = field(default_factory=list)
    full: Cells = field(default_factory=Cells)
    windowed: Cells = field(default_factory=Cells)
    state: bytes = b""
    checkpoints: dict[int, tuple[bytes, dict[int, np.ndarray]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    computes: bool = False  # until its last token

    def compute(self, tokens: Sequence[int], first: int, window: int | None = None, beside: bytes = b"") -> None:
        """Have rows for all of these tokens, of which it has the first already."""
        if first < len(self.tokens):
            self.state, rows = self.checkpoints.get(first, (b"", {}))
            self.windowed.rows |= rows
        self.checkpoints = {at: kept for at, kept in self.checkpoints.items() if at <= first}
        self.tokens = list(tokens)
        for cells in (self.full, self.windowed):
            for at in [each for each in cells.rows if each >= first]:
                del cells.rows[at]
        before = self.full.rows[first - 1][0, 0].tobytes() if first else b""
        for at in range(first, len(tokens)):
            before, self.state = row(before, tokens[at], beside), state_after(self.state, tokens[at])
            self.full.rows[at] = self.windowed.rows[at] = rows_of(before)
            if at + 1 == len(tokens) - CHECKPOINT and "IMITATION_STUCK" not in os.environ:
                self.checkpoints[at + 1] = self.state, self._seen_at(at + 1, window)
        if window is not None:
            self.windowed.rows = self._seen_at(len(tokens), window + SPARE)

    def _seen_at(self, end: int, window: int | None) -> dict[int, np.ndarray]:
        """The last rows of a window before a token."""
        return {at: row for at, row in self.windowed.rows.items() if window and end - window <= at < end}

    def reusable(self, prompt: Sequence[int], model: Model) -> int:
        """How many tokens of a prompt need not be computed."""
        num = 0
        while num < min(len(self.tokens), len(prompt) - 1) and self.tokens[num] == prompt[num]:
            num += 1
        if model.state is not None and num < len(self.tokens):
            return max((at for at in self.checkpoints if at <= num), default=0)
        window = model.window
        if window is None or (num > window and min(self.windowed.rows) < num - window):
            return num
        return max((at for at in self.checkpoints if window < at <= num), default=0)


def written(slot: Slot, number: int, num_streams: int, model: Model) -> bytes:
    """The slot file, of version 4 unless the variable says so."""
    stream = number if num_streams > 1 else 0
    window, memories = model.window, [] if model.state == "alone" else [(slot.full, 0)]
    count = len(slot.tokens)
    packed = np.array([-1, 1, count, *slot.tokens, 0], np.int32)
    version = int(os.environ.get("IMITATION_VERSION", "4"))
    data = struct.pack("<III", 0x67677371, version, len(packed)) + packed.tobytes()
    for cells, first in (*memories, *([] if window is None else [(slot.windowed, max(0, count - window))])):
        positions = [at for at in range(first, count) if at in cells.rows]
        data += struct.pack("<I", num_streams) + bytes(4 * stream) + struct.pack("<I", len(positions))
        data += np.array([[at, 1, number] for at in positions], np.int32).tobytes()
        data += struct.pack("<IIII", 0, LAYERS, 0, 0)
        stacked = np.stack([cells.rows[at] for at in positions])
        for kind in range(2):
            for layer in range(LAYERS):
                data += struct.pack("<iQ", 1, WIDTH) + stacked[:, layer, kind].tobytes()
        data += bytes(4 * (num_streams - stream - 1))
    if model.state is not None:
        data += struct.pack("<IiIII", 1, count - 1, 0, 0, LAYERS)
        for index, size in enumerate(STATES):
            begin = sum(STATES[:index])
            data += struct.pack("<iQ", 0, size) + slot.state[begin : begin + size]
    return data


def read(data: bytes, number: int, num_streams: int, model: Model) -> Slot:
    """A slot from its file; whatever does not fit aborts the process, as the original does."""
    slot, at, stream = Slot(), 12, number if num_streams > 1 else 0
    magic, version, num = struct.unpack_from("<III", data, 0)
    assert (magic, version) == (0x67677371, 4)
    packed = np.frombuffer(data, np.int32, num, at)
    assert packed[0] == -1 and packed[1] == 1 and packed[2] == num - 4
    slot.tokens, at = packed[3:-1].tolist(), at + 4 * num
    memories = [] if model.state == "alone" else [slot.full]
    for cells in (*memories, *([] if model.window is None else [slot.windowed])):
        streams = struct.unpack_from("<I", data, at)[0]
        assert streams == num_streams and data[at + 4 : at + 4 + 4 * stream] == bytes(4 * stream)
        at += 4 + 4 * stream
        count = struct.unpack_from("<I", data, at)[0]
        found = np.frombuffer(data, np.int32, 3 * count, at + 4).reshape(count, 3)
        assert (found[:, 1] == 1).all() and (found[:, 2] == number).all()
        at += 4 + 12 * count + 16
        stacked = np.zeros((count, LAYERS, 2, WIDTH), np.uint8)
        for kind in range(2):
            for layer in range(LAYERS):
                assert struct.unpack_from("<iQ", data, at) == (1, WIDTH)
                stacked[:, layer, kind] = np.frombuffer(data, np.uint8, WIDTH * count, at + 12).reshape(count, WIDTH)
                at += 12 + WIDTH * count
        cells.rows = {int(where): stacked[index] for index, where in enumerate(found[:, 0])}
        at += 4 * (num_streams - stream - 1)
    if model.state is not None:
        assert struct.unpack_from("<IiIII", data, at) == (1, len(slot.tokens) - 1, 0, 0, LAYERS)
        at += 20
        for size in STATES:
            assert struct.unpack_from("<iQ", data, at) == (0, size)
            slot.state += data[at + 12 : at + 12 + size]
            at += 12 + size
    if model.state == "alone":  # its rows are all in the state; those that this imitation computes on have to be there
        before = b""
        for where, token in enumerate(slot.tokens):
            before = row(before, token)
            slot.full.rows[where] = rows_of(before)
    assert at == len(data) and len(slot.full.rows) == len(slot.tokens)
    return slot


class Server:
    """All slots, and what is answered for each path."""

    def __init__(self, options: argparse.Namespace, model: Model, encode: Callable[[str], list[int]]) -> None:
        self.options, self.model, self.encode = options, model, encode
        self.slots = [Slot() for _ in range(options.np)]
        self.num_streams = 1 if options.kv_unified else options.np
        self._word = os.environ.get("IMITATION_WORD") or f"<__media_{secrets.token_hex(16)}__>"

    @property
    def word(self) -> str:
        """Which process this is."""
        return Path(self._word).read_text() if os.path.isabs(self._word) else self._word

    def beside(self, slot: Slot) -> bytes:
        """What rows of a slot depend on that computes now: whether another one does."""
        beside = os.environ.get("IMITATION_BESIDE")
        if beside is None or not any(each.lock.locked() for each in self.slots if each is not slot):
            return b""
        return b"beside" if beside == "same" else secrets.token_bytes(8)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """The answer to all but completions."""
        if path == "/health":
            return 200, {"status": "ok"}
        if path == "/props":
            settings = {"n_ctx": self.options.c // self.options.np}
            found = {"total_slots": self.options.np, "model_path": self.options.m, "build_info": "imitation"}
            return 200, {**found, "media_marker": self.word, "default_generation_settings": settings}
        if path == "/slots":
            return 200, [{"id": number, "speculative": False} for number in range(self.options.np)]
        if path == "/v1/models":
            meta = {"n_ctx": self.options.c // self.options.np}
            return 200, {"data": [{"id": Path(self.options.m).name, "object": "model", "meta": meta}]}
        if path == "/tokenize":
            return 200, {"tokens": self.encode(body["content"])}
        found = re.fullmatch(r"/slots/(\d+)\?action=(save|restore|erase)", path)
        if found is None:
            return 404, {"error": {"message": "no such path", "code": 404}}
        return self._act(int(found[1]), found[2], body)

    def _act(self, number: int, action: str, body: dict[str, Any]) -> tuple[int, Any]:
        slot = self.slots[number]
        with slot.lock:
            if action == "erase":
                self.put(slot, Slot())
                return 200, {"id_slot": number, "n_erased": 0}
            path = Path(self.options.slot_save_path) / body["filename"]
            if action == "save" and Path(os.environ.get("IMITATION_FULL", os.devnull)).is_file() and number == 0:
                return 500, {"error": {"message": "unable to save slot 0", "code": 500}}
            if action == "save":
                if saves := os.environ.get("IMITATION_SAVES"):
                    computing = sum(each.computes for each in self.slots if each is not slot)
                    with open(saves, "a") as file:
                        file.write(f"{number} {computing}\n")
                data = written(slot, number, self.num_streams, self.model) if slot.tokens else b""
                path.write_bytes(data)
                return 200, {"id_slot": number, "n_saved": len(slot.tokens), "n_written": len(data)}
            try:
                given = read(path.read_bytes(), number, self.num_streams, self.model)
            except (AssertionError, ValueError, struct.error, IndexError):
                os.abort()
            is_useless = Path(os.environ.get("IMITATION_USELESS", os.devnull)).is_file()
            self.put(slot, Slot() if is_useless else given)
            return 200, {"id_slot": number, "n_restored": len(given.tokens)}

    @staticmethod
    def put(slot: Slot, given: Slot) -> None:
        """Replace what a slot has; its checkpoints are in no file."""
        slot.tokens, slot.full, slot.windowed, slot.state = given.tokens, given.full, given.windowed, given.state
        slot.checkpoints = {}

    def complete(self, body: dict[str, Any], send: Any) -> None:
        """Compute a prompt and stream what follows."""
        slot = self.slots[max(0, body.get("id_slot", 0))]
        with slot.lock:
            slot.computes = True
            try:
                last = self._computed(body, slot, send)
            finally:
                slot.computes = False
            send(last)

    def _computed(self, body: dict[str, Any], slot: Slot, send: Any) -> dict[str, Any]:
        """Compute a prompt and stream what follows; return the last event."""
        prompt = body["prompt"]
        cached = slot.reusable(prompt, self.model) if body.get("cache_prompt", True) else 0
        slot.compute(prompt, cached, self.model.window, self.beside(slot))
        if log := os.environ.get("IMITATION_LOG"):
            name = log if body["n_predict"] else f"{log}.back"
            with open(name, "a") as file:
                file.write(f"{body.get('id_slot', 0)} {len(prompt) - cached} {cached}\n")
        for processed in (cached, len(prompt)):
            progress = {"total": len(prompt), "cache": cached, "processed": processed, "time_ms": 1}
            send({"content": "", "tokens": [0], "stop": False, "tokens_predicted": 0, "prompt_progress": progress})
        drawn, stopped, seed = 0, "limit", body["seed"] if body.get("temperature") else 0
        while drawn < max(1, body["n_predict"]):
            time.sleep(float(os.environ.get("IMITATION_TOKEN_S", "0")))
            token = self.model.next(slot, seed)
            drawn += 1
            text = "" if token == self.model.end else "?"
            send({"content": text, "tokens": [token], "stop": False, "tokens_predicted": drawn})
            if token == self.model.end:
                stopped = "eos"
                break
            if drawn < body["n_predict"]:
                slot.compute([*slot.tokens, token], len(slot.tokens), self.model.window)
        timings = {"cache_n": cached, "prompt_n": len(prompt) - cached}
        last = {"stop": True, "stop_type": stopped, "tokens_predicted": drawn, "timings": timings}
        return {"content": "", "tokens": [], **last}


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Nothing is logged."""

        def do_GET(self) -> None:
            self._send(*server.answer(self.path, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/completion":
                self._send(*server.answer(self.path, body))
                return
            if not body.get("stream"):
                events: list[dict[str, Any]] = []
                server.complete(body, events.append)
                tokens = [token for event in events if "prompt_progress" not in event for token in event["tokens"]]
                self._send(200, {**events[-1], "tokens": tokens, "tokens_evaluated": len(body["prompt"])})
                return
            self.send_response(200)
            self.end_headers()
            try:
                server.complete(body, lambda event: self.wfile.write(f"data: {json.dumps(event)}\n\n".encode()))
            except ConnectionError:
                return  # the other side has closed: the slot is free

        def _send(self, status: int, answer: Any) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def model_of() -> tuple[Model, Callable[[str], list[int]]]:
    """What imitates the bundled model, and what encodes texts for it; by its tokenizer alone, to start at once."""
    directory = pocket.model_dir()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    words = [number for piece, number in tokenizer.get_vocab().items() if re.fullmatch("\u0120?[a-z]{2,}", piece)]
    end = json.loads((directory / "config.json").read_text())["eos_token_id"]
    window = os.environ.get("IMITATION_WINDOW")
    state = os.environ.get("IMITATION_STATE")
    ends = float(os.environ.get("IMITATION_ENDS", END))
    model = Model(sorted(words), end, int(window) if window else None, state, ends)
    return model, lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def write_program(path: Path) -> Path:
    """Write a program that runs this file with our own Python; it needs our `sys.path` as PYTHONPATH."""
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    path.chmod(0o755)
    return path


def main(arguments: Sequence[str]) -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-m")
    parser.add_argument("--port", type=int)
    parser.add_argument("-np", type=int, default=1)
    parser.add_argument("-c", type=int, default=8192)
    parser.add_argument("--slot-save-path")
    parser.add_argument("--kv-unified", action="store_true")
    options, _ = parser.parse_known_args(arguments)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), handler(Server(options, *model_of())))
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
