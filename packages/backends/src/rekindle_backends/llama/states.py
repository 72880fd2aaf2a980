"""States of slots between llama-server and the blocks of an arena, by files on a RAM disk.

Runs on the backend's thread; what copies bytes, on two threads of its own. A file that reaches llama-server was put
together here just before, of blocks whose records were checked when they were read: it aborts on a file that is cut,
and believes any other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from rekindle.errors import BackendFailed
from rekindle.kv.arena import KVArena
from rekindle_backends.client import Backend
from rekindle_backends.llama.shapes import FileShape
from rekindle_backends.llama.slot_file import SlotFile
from rekindle_backends.llama.slot_folder import SlotFolder
from rekindle_backends.llama.transfer import put, take

T = TypeVar("T")
STATE_S = 600.0  # a slot that computes lets a save wait for the end of its reply


class States:
    """Reads and writes the states of one server's slots, whose files have this `shape`; blocks lie in `arena`.

    `check` is called after each, and raises BackendFailed if that server may not be the one that was probed.
    """

    def __init__(
        self,
        backend: Backend,
        folder: SlotFolder,
        arena: KVArena,
        shape: FileShape,
        *,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.shape = shape
        self._backend = backend
        self._folder = folder
        self._check = check
        self._arena = arena
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="slot-files")

    async def save(self, slot: int, num_tokens: int) -> SlotFile:
        """Have a slot's state of about so many tokens written, and read it; BackendFailed or SlotFileError if not."""
        name = self._new_name(num_tokens)
        try:
            await self._act(slot, "save", name)
            return await self._on_thread(lambda: SlotFile.open(self._folder.path / name, shape=self.shape))
        finally:
            self._folder.remove(name)

    async def take(self, file: SlotFile, blocks: Sequence[int], first: int, end: int) -> None:
        """Copy tokens [first, end) of a file into blocks, which nobody else reads or writes meanwhile."""
        await self._on_thread(lambda: take(file, self._arena, blocks, first, end))

    async def restore(
        self, slot: int, blocks: Sequence[int], ids: np.ndarray, num_tokens: int, read: Callable[[], None]
    ) -> None:
        """Give a slot the first `num_tokens` tokens (their uint32 `ids`) of these blocks; BackendFailed if it refuses.

        `read` is called on any thread once the blocks are not read any more, also after a cancellation or a failure.
        """
        try:
            name = self._new_name(num_tokens)
            path, tokens = self._folder.path / name, ids[:num_tokens].astype(np.int32)
            work = self._threads.submit(put, self._arena, blocks, num_tokens, tokens, self.shape, path, slot)
        except BaseException:
            read()
            raise
        is_given_up = threading.Event()

        def ended(done: Future[int]) -> None:
            read()
            if is_given_up.is_set():
                self._folder.remove(name)

        work.add_done_callback(ended)
        try:
            await asyncio.shield(asyncio.wrap_future(work))
            answer = await self._act(slot, "restore", name)
        finally:
            is_given_up.set()
            self._folder.remove(name)
        if answer.get("n_restored") != num_tokens:
            raise BackendFailed(f"llama-server restored {answer.get('n_restored')} of {num_tokens} tokens")

    async def erase(self, slot: int) -> None:
        """Empty a slot; BackendFailed if that cannot be."""
        await self._act(slot, "erase", None)

    def _new_name(self, num_tokens: int) -> str:
        """A name for a state of so many tokens, or a few more."""
        layout = self._arena.layout
        more = 0 if layout.state_part is None else layout.state_part.payload_bytes
        return self._folder.new_name(int(layout.token_bytes * (num_tokens + 256)) + more)

    async def _act(self, slot: int, action: str, name: str | None) -> dict[str, Any]:
        body = {} if name is None else {"filename": name}
        path = f"/slots/{slot}?action={action}"
        status, answer = await self._backend.fetch("POST", path, body, timeout_s=STATE_S)
        if status != 200 or not isinstance(answer, dict):
            raise BackendFailed(
                f"llama-server answers {action} of slot {slot} with status {status}: {str(answer)[:200]}"
            )
        if self._check is not None and name is not None:
            await self._check()
        return answer

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._threads.submit(work))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)
