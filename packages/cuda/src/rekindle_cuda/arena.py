"""Hot blocks of a card on their way to the host and back, next to what the card computes.

    save   engine's thread: row ──▶ pinned memory, in the order of its launches    writer: waits ──▶ payload
    load   reader: pinned room ──▶ row, on a stream of its own, then waits

Neither stops the engine's thread. What is launched after a save waits on the card until the row is copied, which takes
a fiftieth of a millisecond for a block, so that nothing needs a second copy there. A load waits for what was done to
blocks outside of steps, as by a purge, or by a save of the block that was there before, which may come after a step.
It does not wait for steps: they know nothing of a block that is being loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Protocol

import numpy as np
import torch

from rekindle.cache.blocks.windows import WindowSlots
from rekindle.kv.arena import KVArena, on_host
from rekindle.kv.copies import BlockPart, Wait, at_once
from rekindle.spec import KVLayout


class Point(Protocol):
    """Of a stream, between two launches."""

    def synchronize(self) -> None:
        """Wait for all that was launched there before."""


class Streams(Protocol):
    """The order of copies on a device, as far as an arena needs it."""

    def point(self) -> Point:
        """The point that the calling thread's stream has come to."""

    def own(self, after: Point | None) -> AbstractContextManager[None]:
        """What is launched inside goes to a stream that only the calling thread has, after a point of another one; at
        the end all of it is done."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Memory of the host, uint8, that a device copies from and to by itself."""


class CudaStreams:
    """Those of a card."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._local = device, threading.local()

    def point(self) -> Point:
        """As `Streams.point`."""
        found: Point = torch.cuda.current_stream(self._device).record_event()
        return found

    @contextmanager
    def own(self, after: Point | None) -> Iterator[None]:
        """As `Streams.own`."""
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)
        stream = self._local.stream
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """As `Streams.pinned`; torch keeps it for the next caller."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class CardArena(KVArena):
    """A `KVArena` whose copies to and from the host go on while a card computes."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device, windows: Sequence[WindowSlots], streams: Streams
    ) -> None:
        super().__init__(layout, num_blocks, device, windows)
        self._streams = streams
        self._used: Point | None = None  # where blocks were last read or changed outside of steps

    def copy_out(self, parts: Sequence[BlockPart]) -> Wait:
        """As `KVArena.copy_out`."""
        if not parts:
            return at_once
        copies = [self._streams.pinned(each.payload.nbytes) for each in parts]
        for each, copy in zip(parts, copies, strict=True):
            copy.copy_(self.parts[each.part][self.row(each.part, each.block)], non_blocking=True)
        copied = self._used = self._streams.point()

        def wait() -> None:
            copied.synchronize()
            for each, copy in zip(parts, copies, strict=True):
                torch.from_numpy(each.payload).copy_(copy)
                self.cut(each.part, each.num_tokens, each.payload)

        return cache(wait)

    def room(self, block: int, part: int) -> np.ndarray:
        """As `KVArena.room`: pinned memory."""
        found: np.ndarray = self._streams.pinned(self.layout.parts[part].payload_bytes).numpy()
        return found

    def copy_in(self, parts: Sequence[BlockPart]) -> None:
        """As `KVArena.copy_in`."""
        payloads = [on_host(each.payload) for each in parts]  # until all are copied
        with self._streams.own(after=self._used):
            for each, payload in zip(parts, payloads, strict=True):
                self.parts[each.part][self.row(each.part, each.block)].copy_(payload, non_blocking=True)

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """As `KVArena.copy_tokens`."""
        super().copy_tokens(source, target, num_tokens)
        self._used = self._streams.point()

    def wipe_row(self, part: int, row: int, first_token: int = 0) -> None:
        """As `KVArena.wipe_row`."""
        super().wipe_row(part, row, first_token)
        self._used = self._streams.point()
