"""A llama-server that was started elsewhere: whether its rows are those of the server that was probed.

    probed ──another process answers──▶ unknown ──the same rows again──▶ probed
                                           └──other rows──▶ refused, for as long as that process runs

Its flags cannot be seen, so what its rows depend on is known by those of a few tokens. Which process answers is known
by a word in /props that each start draws anew; of a server without one no state is kept. Runs on the backend's thread.
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
from rekindle_backends.llama.slot_file import SlotFile
from rekindle_backends.llama.slot_folder import SlotFolder
from rekindle_backends.llama.wire import PROPS
from rekindle_backends.wire import error_text

logger = logging.getLogger(__name__)
DRAWN = re.compile(r"<__media_\w{16,}__>")  # of llama.cpp's server-common.cpp; it may be set to a fixed word
MOST_PROBES = 4  # another client's tokens in the same batch change bits
KINDS: tuple[Kind, ...] = ("k", "v")


class JoinedServer:
    """Whether the server at `backend` has the rows of its probe; `num_starts` counts its processes."""

    def __init__(self, backend: Backend, folder: SlotFolder) -> None:
        self.num_starts = 0
        self.rows = ""  # digest of the rows that were probed
        self._backend = backend
        self._folder = folder
        self._process: str | None = None  # the word of the process that has these rows
        self._refused: str | None = None  # of one that has others
        self._looks: Future[None] | None = None  # a task that nothing refers to may be collected
        self._lock = asyncio.Lock()

    async def join(self) -> SlotFile:
        """Learn the rows of the server, and return its probe; BackendFailed or SlotFileError if nothing can be kept."""
        process = await self._word()
        file = await self._probed()
        self.rows = digest_of(file)
        await self._put_back(file)
        if await self._word() != process:
            raise BackendFailed("it was started again meanwhile")
        self._process = process
        return file

    async def check(self) -> None:
        """Return if the process that was probed still runs, and so has done what was asked of it; else BackendFailed,
        after another one was probed."""
        async with self._lock:
            process = await self._word()
            if process == self._process:
                return
            if process != self._refused:
                self.num_starts += 1
                self._process, file = None, await self._probed()
                if digest_of(file) == self.rows and await self._word() == process:
                    self._process = process
                    logger.warning("the llama-server at %s was started again: its slots are empty", self._backend.url)
                    raise BackendFailed("llama-server was started again meanwhile")
                self._refused = process
                logger.error(
                    "the llama-server at %s was started again, and computes other rows now: nothing is read or kept "
                    "before this server is started again, too",
                    self._backend.url,
                )
            raise BackendFailed("llama-server was started again with another model or other flags")

    def watch(self) -> None:
        """Notice a new process within seconds, so that memories are restored in its slots."""
        self._looks = self._backend.run(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.check()
            except (RekindleError, OSError) as error:  # it does not answer, or its folder is gone: looked at again
                logger.debug("%s", error)

    async def _word(self) -> str:
        status, props = await self._backend.fetch("GET", PROPS)
        word = props.get("media_marker") if status == 200 and isinstance(props, dict) else None
        if not isinstance(word, str) or not DRAWN.fullmatch(word):
            raise BackendFailed("its /props does not say which of its processes answers, as builds from b11434 on do")
        return word

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


def check_joinable(probed: ProbedSlots) -> None:
    """Raise Unsupported for a model with windows: whether a server keeps them whole cannot be seen, and they would be
    wrong in a slot that is restored."""
    if any(isinstance(part.kind, WindowPart) for part in probed.layout.parts):
        raise Unsupported("its layers have windows: start it here, as its flags cannot be seen (swa-full)")
