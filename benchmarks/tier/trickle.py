"""A bucket that trickles: a tier's directory in S3's protocol, a text's blocks one after the other, byte by byte."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from rekindle_tier.sealing import BLOCKS

PIECES = 8  # of a block, with a pause before each
LIST = b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'


class Trickle(ThreadingHTTPServer):
    """Serves the objects below `directory` in buckets of any name; what is written is taken and not kept.

    The first block of a text comes at once, then every `block_s` seconds the next one is complete; 0 until it is set.
    All other objects come at once.
    """

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.block_s = 0.0
        self._lock = threading.Lock()
        self._places: dict[str, tuple[int, int]] = {}  # by the name of a block's object: its text and place
        self._began: dict[tuple[str, int], float] = {}  # by bucket and text

    def add(self, blocks: Sequence[str]) -> None:
        """Take in a text, as the names of its blocks' objects in order."""
        text = len(self._places)  # no other text has it
        self._places.update({name: (text, at) for at, name in enumerate(blocks)})

    def begins(self, bucket: str, name: str) -> float | None:
        """Return when an object begins to come (monotonic); None: now, all of it."""
        text, at = self._places.get(name, (None, 0))
        if text is None or not at or not self.block_s:
            return None
        with self._lock:
            return self._began.setdefault((bucket, text), time.monotonic()) + (at - 1) * self.block_s

    def environment(self) -> Mapping[str, str]:
        """Return the variables under which S3's clients find it."""
        address = f"http://127.0.0.1:{self.server_port}"
        return {
            "AWS_ENDPOINT_URL": address,
            "AWS_REGION": "none",
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Trickle

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        bucket, _, name = asked.path.removeprefix("/").partition("/")
        path = self.server.directory / name
        if "list-type" in asked.query:
            self._head(HTTPStatus.OK, LIST)
            self.wfile.write(LIST)
        elif not path.is_file():
            self._head(HTTPStatus.NOT_FOUND, b"")
        else:
            data = path.read_bytes()
            self._head(HTTPStatus.OK, data)
            if self.command == "GET":
                self._send(data, self.server.begins(bucket, f"{BLOCKS}/{path.name}"))

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._head(HTTPStatus.OK, b"")

    def _head(self, status: HTTPStatus, data: bytes) -> None:
        self.send_response(status)
        for name, value in (("Content-Length", str(len(data))), ("ETag", '"1"'), ("Last-Modified", formatdate())):
            self.send_header(name, value)
        self.end_headers()

    def _send(self, data: bytes, began: float | None) -> None:
        """Write the data in pieces from a moment on; None: at once."""
        num = PIECES if began is not None else 1
        step = -(-len(data) // num) or 1
        try:
            for at, start in enumerate(range(0, len(data), step), 1):
                if began is not None:
                    time.sleep(max(0.0, began + self.server.block_s * at / num - time.monotonic()))
                self.wfile.write(data[start : start + step])
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # who asked has given up

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextmanager
def trickling(directory: Path) -> Iterator[Trickle]:
    """Serve a tier's directory as a bucket, to which the environment points until the end of the block."""
    server = Trickle(directory)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    before = {name: os.environ.get(name) for name in server.environment()}
    os.environ.update(server.environment())
    try:
        yield server
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        server.shutdown()
        serving.join()
        server.server_close()
