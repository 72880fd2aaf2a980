"""A llama-server that was started elsewhere: whether its rows are those of the server that was probed.

    probed ──another process answers──▶ unknown ──the same slots and rows again──▶ probed
                                           └──others──▶ refused, for as long as that process runs

One that computes for us stays unknown until it rests: its batches would change the bits of the rows.

Its flags cannot be seen, so what its rows depend on is known by those of a few tokens. Files and requests are written
for as many slots as it had at the join, each with memory of its own or not: those of another form would abort it.
Which process answers is known by a word in /props that each start draws anew; of a server without one no state is
kept. Runs on the backend's thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from concurrent.futures import Future

from rekindle.errors import BackendFailed, RekindleError
from rekindle.parts import WindowPart
from rekindle_backends.client import LOOK_EVERY_S, Backend
from rekindle_backends.llama.layout import Unsupported
from rekindle_backends.llama.probe import ProbedSlots, probe
from rekindle_backends.llama.sections import Kind
from rekindle_backends.llama.shapes import FileShape
from rekindle_backends.llama.slot_file import SlotFile
from rekindle_backends.llama.slot_folder import SlotFolder
from rekindle_backends.llama.wire import PROPS
from rekindle_backends.wire import error_text

logger = logging.getLogger(__name__)
DRAWN = re.compile(r"<__media_\w{16,}__>")  # of llama.cpp's server-common.cpp; it may be set to a fixed word
MOST_PROBES = 4  # another client's tokens in the same batch change bits
QUIET_S = 3.0  # it looks once a second whether a client has left (HTTP_POLLING_SECONDS), and computes until then
SOON_S = 0.5  # until a process that computes for us is looked at again: it may rest for a moment only
BUSY = "llama-server was started again, and computes: its rows are compared once it has nothing to do"
MEANWHILE = "llama-server was started again meanwhile"
KINDS: tuple[Kind, ...] = ("k", "v")


class JoinedServer:
    """Whether the server at `backend` has `num_slots` slots as they were probed; `num_starts` counts its processes."""

    def __init__(self, backend: Backend, folder: SlotFolder, num_slots: int) -> None:
        self.num_starts = 0
        self.rows = ""  # digest of the rows that were probed
        self._backend = backend
        self._folder = folder
        self._num_slots = num_slots
        self._shape: FileShape | None = None  # of its slot files
        self._process: str | None = None  # the word of the process that has these slots and rows
        self._seen: str | None = None  # that of the last one that answered
        self._refusal: str | None = None  # why that one is refused, if it has others
        self._looks: Future[None] | None = None  # a task that nothing refers to may be collected
        self._lock = asyncio.Lock()

    async def join(self) -> SlotFile:
        """Learn the rows of the server, and return its probe; BackendFailed or SlotFileError if nothing can be kept."""
        process, num_slots = await self._props()
        if num_slots != self._num_slots:
            raise BackendFailed(MEANWHILE)
        file = await self._probed()
        self.rows, self._shape = digest_of(file), file.shape
        await self._put_back(file)
        if (await self._props())[0] != process:
            raise BackendFailed(MEANWHILE)
        self._process = self._seen = process
        return file

    async def check(self) -> None:
        """Return if the process that was probed still runs, and so has done what was asked of it; else BackendFailed,
        after another one was probed, if that can be now."""
        async with self._lock:
            process, num_slots = await self._props()
            if process == self._process:
                return
            if process != self._seen:
                self.num_starts += 1
                self._seen, self._process, self._refusal, self._backend.unusable = process, None, None, None
            if self._refusal is None:
                await self._compare(process, num_slots)
            raise BackendFailed(self._refusal or MEANWHILE)

    async def _compare(self, process: str, num_slots: int) -> None:
        """Accept or refuse a process; BackendFailed while that is not known: if another one answers meanwhile, or it
        computes for us, as tokens in the same batch change bits."""
        if num_slots != self._num_slots:
            self._refuse_slots(f"it has {num_slots} slots and had {self._num_slots}")
            return
        if not self._backend.rests():
            raise BackendFailed(BUSY)
        has_rested, num_sent = self._backend.rests(QUIET_S), self._backend.num_sent
        file = await self._probed()
        if (await self._props())[0] != process:
            raise BackendFailed(MEANWHILE)
        if _is_unified(file.shape) != _is_unified(self._shape):
            self._refuse_slots("its slots have one cache now or had one before (--kv-unified)")
        elif file.shape == self._shape and digest_of(file) == self.rows:
            self._process = process
            logger.warning("the llama-server at %s was started again: its slots are empty", self._backend.url)
        elif not has_rested or self._backend.num_sent != num_sent:
            raise BackendFailed(BUSY)
        else:
            self._refusal = "llama-server was started again with another model or other flags"
            logger.error(
                "the llama-server at %s was started again, and computes other rows now: nothing is read or kept "
                "before this server is started again, too",
                self._backend.url,
            )

    def _refuse_slots(self, how: str) -> None:
        """Refuse a process whose slots are others than requests and files are written for."""
        self._refusal = (
            f"the llama-server at {self._backend.url} was started again, and {how}: restart this server, too"
        )
        self._backend.unusable = self._refusal
        logger.error("%s; nothing is read or kept before", self._refusal)

    def watch(self) -> None:
        """Notice a new process within seconds, so that memories are restored in its slots."""
        self._looks = self._backend.run(self._look())

    async def _look(self) -> None:
        while True:
            is_known = self._process == self._seen or self._refusal is not None
            await asyncio.sleep(LOOK_EVERY_S if is_known else min(SOON_S, LOOK_EVERY_S))
            try:
                await self.check()
            except (RekindleError, OSError) as error:  # it does not answer, or its folder is gone: looked at again
                logger.debug("%s", error)

    async def _props(self) -> tuple[str, int]:
        """The word of the process that answers, and how many slots it has."""
        status, props = await self._backend.fetch("GET", PROPS)
        match props:
            case {"media_marker": str(word), "total_slots": int(num_slots)} if status == 200 and DRAWN.fullmatch(word):
                return word, num_slots
            case _:
                raise BackendFailed(
                    "its /props does not say which of its processes answers, as builds from b11434 on do"
                )

    async def _probed(self) -> SlotFile:
        """The state of the probe, once two in a row have the same rows."""
        before = None
        for _ in range(MOST_PROBES):
            file = await probe(self._backend, self._folder)
            if digest_of(file) == before:
                return file
            before = digest_of(file)
        raise BackendFailed("it computes other bits each time: is it asked by others, too?")

    async def _put_back(self, file: SlotFile) -> None:
        """See that it reads what is written here."""
        name = self._folder.new_name(len(file.data))
        try:
            (self._folder.path / name).write_bytes(file.data.tobytes())
            for action, body in (("restore", {"filename": name}), ("erase", {})):
                path = f"/slots/{file.slot}?action={action}"
                status, answer = await self._backend.fetch("POST", path, body)
                if status != 200:
                    raise BackendFailed(f"it answers {action} of a slot with status {status}: {error_text(answer)}")
        finally:
            self._folder.remove(name)


def digest_of(file: SlotFile) -> str:
    """A digest of all rows of attention in a file, and of its recurrent state."""
    digest = hashlib.blake2b(digest_size=16)
    for section, shape in enumerate(file.shape.attention):
        for layer in range(len(shape.k)):
            for kind in KINDS if shape.v else KINDS[:1]:
                digest.update(file.rows(section, layer, kind).tobytes())
    for state in file.states():
        digest.update(state.tobytes())
    return digest.hexdigest()


def _is_unified(shape: FileShape | None) -> bool:
    """Whether slots have one cache together; one slot has its own in either case."""
    return shape is not None and shape.num_streams == 1


def check_joinable(probed: ProbedSlots) -> None:
    """Raise Unsupported for a model with windows: whether a server keeps them whole cannot be seen, and they would be
    wrong in a slot that is restored."""
    if any(isinstance(part.kind, WindowPart) for part in probed.layout.parts):
        raise Unsupported("its layers have windows: start it here, as its flags cannot be seen (swa-full)")
