"""States of slots between llama-server and the blocks of an arena, by files on a RAM disk.

Runs on the backend's thread; what copies bytes, on two threads of its own. A file that reaches llama-server was put
together here just before, of blocks whose records were checked when they were read: it aborts on a file that is cut,
and believes any other.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from rekindle.errors import BackendFailed, RekindleError
from rekindle.kv.arena import KVArena
from rekindle_backends.client import Arrived, Backend, Sending
from rekindle_backends.llama.gaps import Gaps
from rekindle_backends.llama.shapes import FileShape
from rekindle_backends.llama.slot_file import SlotFile
from rekindle_backends.llama.slot_folder import SlotFolder
from rekindle_backends.llama.transfer import put, take
from rekindle_backends.llama.wire import COMPLETION, EventReader, completion_body
from rekindle_backends.wire import Call

logger = logging.getLogger(__name__)
T = TypeVar("T")
NO_GAPS = Gaps(())  # of a stream without a reply
FEW = 2  # tokens after a checkpoint that a slot computes to go back: with windows, the last one in it, too
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

    async def go_back(self, slot: int, ids: np.ndarray) -> SlotFile | None:
        """Have a slot go back to the first tokens of its text, whose `ids` these are, and read its state there.

        It computes the last ones of them, after a checkpoint. None if that cannot be: a slot without the checkpoint is
        stopped before it computes them all, and what it has then is not known.
        """
        try:
            await self._ask_back(slot, ids)
            file = await self.save(slot, len(ids))
            if not np.array_equal(file.tokens, ids.astype(np.int32)):
                raise BackendFailed("it has other tokens")
        except (RekindleError, OSError, ValueError) as error:
            logger.warning("slot %d of llama-server cannot go back to %d tokens: %s", slot, len(ids), error)
            return None
        return file

    async def _ask_back(self, slot: int, ids: np.ndarray) -> None:
        """Have a slot compute the last few of these tokens; BackendFailed if it would be more."""
        left, sendings, errors = asyncio.Event(), list[Sending](), list[RekindleError]()

        def emit(arrived: Arrived) -> None:
            if isinstance(arrived, RekindleError):
                errors.append(arrived)
            elif arrived is not None and arrived.cached_tokens is not None and arrived.cached_tokens < len(ids) - FEW:
                errors.append(BackendFailed(f"it has a state after {arrived.cached_tokens} of them"))
                sendings[0].cancel()

        body = completion_body(ids.tolist(), {"n_predict": 0, "temperature": 0, "id_slot": slot})
        call = Call(COMPLETION, body, {}, EventReader(NO_GAPS, len(ids)).read)
        sendings.append(self._backend.submit(call, emit, left=left.set))
        await left.wait()
        if errors:
            raise errors[0]

    async def take(
        self, file: SlotFile, blocks: Sequence[int], first: int, end: int, *, back: SlotFile | None = None
    ) -> None:
        """Copy tokens [first, end) of a file into blocks, which nobody else reads or writes meanwhile; before its
        windows and its state those of one that its slot wrote when it had gone `back`."""

        def work() -> None:
            if back is not None:
                take(back, self._arena, blocks, len(back.tokens), len(back.tokens))
            take(file, self._arena, blocks, first, end)

        await self._on_thread(work)

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
