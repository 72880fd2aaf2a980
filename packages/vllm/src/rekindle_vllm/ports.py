"""Ways from a worker to the owner of the store: directly in its process, through a socket from others.

Tensor-parallel workers do the same steps with the same keys, each for its heads. The owner's server waits for all of
them: a record is saved once every part of it has come, and read once for all. What it answers is the same for all, so
that none counts on a record that another lacks. If a connection ends, saves that wait for it end with nothing.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.worker import fulfil
from rekindle_vllm.codec import Bytes
from rekindle_vllm.owner import OPEN, RecordOwner
from rekindle_vllm.shares import HeadCopies, HeadShare
from rekindle_vllm.steps import Address
from rekindle_vllm.transfers import Port

logger = logging.getLogger(__name__)


class DirectPort:
    """To an owner in this process, of a worker that has all heads."""

    def __init__(self, owner: RecordOwner) -> None:
        self._owner = owner

    def begin_load(self, key: int, first: int, rows: Sequence[Bytes]) -> Future[int]:
        """As `Port.begin_load`."""
        return self._owner.begin_load(key, first, rows)

    def save(self, key: int, first: int, rows: Sequence[Bytes], deadline: float) -> int:
        """As `Port.save`."""
        return self._owner.save(key, first, rows, deadline)

    def close(self) -> None:
        """Nothing is open."""


class SocketPort:
    """To an owner in another process, of one of its tensor-parallel workers; one thread speaks, in turn."""

    def __init__(self, address: Address, rank: int) -> None:
        assert address.path is not None, f"the owner of the store, process {address.pid}, listens to no other process"
        self._connection: Connection = Client(address.path, "AF_UNIX", authkey=bytes.fromhex(address.token))
        self._connection.send_bytes(json.dumps({"rank": rank}).encode())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rekindle-port")

    def begin_load(self, key: int, first: int, rows: Sequence[Bytes]) -> Future[int]:
        """As `Port.begin_load`; a record counts only if all workers can have it."""

        def load() -> int:
            good = self._ask({"load": key, "first": first, "count": len(rows)})
            for row in rows[:good]:
                self._connection.recv_bytes_into(row.data)
            return good

        return self._thread.submit(load)

    def save(self, key: int, first: int, rows: Sequence[Bytes], deadline: float) -> int:
        """As `Port.save`; returns once the parts of all workers have come."""

        def save() -> int:
            wait_s = max(0.0, deadline - time.monotonic())
            return self._ask({"save": key, "first": first, "count": len(rows), "wait_s": wait_s}, rows)

        return self._thread.submit(save).result()

    def close(self) -> None:
        """End the connection."""
        self._thread.shutdown()
        self._connection.close()

    def _ask(self, head: dict[str, Any], rows: Sequence[Bytes] = ()) -> int:
        self._connection.send_bytes(json.dumps(head).encode())
        for row in rows:
            self._connection.send_bytes(row.data)
        return int(json.loads(self._connection.recv_bytes()))


def port_to(address: Address, share: HeadShare) -> Port:
    """The way to the owner for the worker of this share."""
    if address.pid == os.getpid() and share.num_workers == 1:
        return DirectPort(OPEN[address.token])
    return SocketPort(address, share.rank)


@dataclass(slots=True, eq=False)
class _Meeting:
    """One load or save of all workers: whole payloads, how many workers came, and of how many records at least."""

    rows: Bytes
    count: int
    came: int = 0
    left: int = 0
    outcome: Future[int] = field(default_factory=Future)


class OwnerServer:
    """Serves the workers of one engine from the owner's process, a thread for each. Its address is the owner's."""

    def __init__(self, owner: RecordOwner, shares: Sequence[HeadShare]) -> None:
        self._owner, self._shares = owner, tuple(shares)
        parts = owner.layout.parts
        self._copies = [[HeadCopies(share, owner.layout, part.index) for part in parts] for share in shares]
        self._directory = Path(tempfile.mkdtemp(prefix="rekindle-"))  # 0700
        path = str(self._directory / "owner")
        self._listener = Listener(path, "AF_UNIX", backlog=len(shares), authkey=bytes.fromhex(owner.address.token))
        owner.address = replace(owner.address, path=path)
        self._lock = threading.Lock()
        self._meetings: dict[tuple[str, int, int], _Meeting] = {}
        self._connections: list[Connection] = []
        self._closed = False
        threading.Thread(target=self._accept, name="rekindle-owner", daemon=True).start()

    @property
    def num_meetings(self) -> int:
        """Loads and saves that not all workers have had."""
        return len(self._meetings)

    def close(self) -> None:
        """End all connections. Closing twice is safe."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        for connection in self._connections:
            self._end(connection)
        self._give_up()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _accept(self) -> None:
        for _ in self._shares:
            try:
                connection = self._listener.accept()
            except OSError:
                return  # closed
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), name="rekindle-worker", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Answer one worker until its connection ends or cannot be served; then nobody waits for it, nor it for us."""
        try:
            rank = int(json.loads(connection.recv_bytes())["rank"])
            while True:
                head = json.loads(connection.recv_bytes())
                (self._load if "load" in head else self._save)(connection, rank, head)
        except (EOFError, OSError) as error:
            if not self._closed:
                logger.info("the connection of a worker ended: %r", error)
        except Exception:
            # Border: whatever a worker sends ends its connection, never the owner.
            logger.exception("a worker could not be served")
        finally:
            self._end(connection)
            self._give_up()

    def _end(self, connection: Connection) -> None:
        with self._lock:  # two threads may, and a descriptor that is closed twice may be another's by then
            connection.close()

    def _load(self, connection: Connection, rank: int, head: dict[str, Any]) -> None:
        key, first, count = int(head["load"]), int(head["first"]), int(head["count"])

        def begin(meeting: _Meeting) -> None:
            self._owner.begin_load(key, first, list(meeting.rows)).add_done_callback(
                lambda done: meeting.outcome.set_result(done.result())
            )

        copies = self._copies[rank][self._owner.part(key)]  # a key may be forgotten once all have answers
        meeting = self._meet("load", key, first, count, begin_when=1, begin=begin)
        good = meeting.outcome.result()
        connection.send_bytes(json.dumps(good).encode())
        own = np.zeros(copies.payload_bytes, dtype=np.uint8)
        for row in meeting.rows[:good]:
            copies.cut(row, own)
            connection.send_bytes(own.data)
        self._leave("load", key, first, meeting)

    def _save(self, connection: Connection, rank: int, head: dict[str, Any]) -> None:
        key, first, count = int(head["save"]), int(head["first"]), int(head["count"])
        copies = self._copies[rank][self._owner.part(key)]
        own = np.zeros((count, copies.payload_bytes), dtype=np.uint8)
        for row in own:
            connection.recv_bytes_into(row.data)

        def begin(meeting: _Meeting) -> None:
            rows, deadline = list(meeting.rows[: meeting.count]), time.monotonic() + float(head["wait_s"])
            fulfil(meeting.outcome, lambda: self._owner.save(key, first, rows, deadline))

        def paste(meeting: _Meeting) -> None:
            if len(meeting.rows) < count:
                meeting.rows = np.concatenate((meeting.rows, self._zeros(key, count - len(meeting.rows))))
            for number in range(count if self._shares[rank].saves else 0):
                copies.paste(own[number], meeting.rows[number])

        meeting = self._meet("save", key, first, count, begin_when=len(self._shares), begin=begin, bring=paste)
        connection.send_bytes(json.dumps(meeting.outcome.result()).encode())
        self._leave("save", key, first, meeting)

    def _meet(
        self,
        kind: str,
        key: int,
        first: int,
        count: int,
        *,
        begin_when: int,
        begin: Callable[[_Meeting], None],
        bring: Callable[[_Meeting], None] = lambda meeting: None,
    ) -> _Meeting:
        """Join the meeting of this load or save, `bring` what is needed; the worker that completes it begins."""
        with self._lock:
            meeting = self._meetings.get((kind, key, first))
            if meeting is None:
                meeting = self._meetings[kind, key, first] = _Meeting(self._zeros(key, count), count)
            bring(meeting)
            meeting.count = min(meeting.count, count)
            meeting.came += 1
            begins = meeting.came == begin_when and not meeting.outcome.done()
        if begins:
            begin(meeting)
        return meeting

    def _leave(self, kind: str, key: int, first: int, meeting: _Meeting) -> None:
        with self._lock:
            meeting.left += 1
            if meeting.left == len(self._shares):
                del self._meetings[kind, key, first]

    def _give_up(self) -> None:
        """End every save that waits for a worker with nothing; loads end by themselves."""
        with self._lock:
            for (kind, _, _), meeting in self._meetings.items():
                if kind == "save" and meeting.came < len(self._shares) and not meeting.outcome.done():
                    meeting.outcome.set_result(0)

    def _zeros(self, key: int, count: int) -> Bytes:
        payload_bytes = self._owner.layout.parts[self._owner.part(key)].payload_bytes
        return np.zeros((count, payload_bytes), dtype=np.uint8)
