"""A session as one file: a tar archive of its document and of the files of its agents, with their digests at its end.

    session.json     id, document and agents of the session
    agents/N.agent   the file of each agent that has a memory (docs/agent-files.md)
    SHA256SUMS       of all before, as `sha256sum` writes them

Owns the form of the file. It is read once from its start, also while it is decrypted; nothing is taken from it before
its end was seen.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, Any, BinaryIO, cast

from rekindle.errors import BadRequest
from rekindle.store.agent_file import MAGIC, AgentFileReader
from rekindle_sessions.log.codec import unpacked

DOCUMENT, SUMS = "session.json", "SHA256SUMS"
MOST_DOCUMENT = 256 << 20  # bytes
PIECE = 1 << 16


def refused(why: str) -> BadRequest:
    """Return the error for a file that is not taken in."""
    return BadRequest(f"the session is not imported, and nothing has changed: {why}", param="file")


@dataclass(frozen=True, slots=True)
class Contents:
    """What `session.json` says: the session's id there, its document, and the ids of its agents' memories in the order
    of their files."""

    id: str
    session: dict[str, Any]
    agents: tuple[str, ...]

    @classmethod
    def from_json(cls, data: bytes) -> Contents:
        """Return what a file says of itself; BadRequest if that cannot be read."""
        try:
            return unpacked(cls, data)
        except ValueError as error:
            raise refused(f"{DOCUMENT} cannot be read ({error})") from error

    def outlives(self, agent: str) -> bool:
        """Whether an agent is permanent: the ids of all others begin with that of their session."""
        return not agent.startswith(f"{self.id}/")

    def agent_in(self, session: str, agent: str) -> str:
        """Return the id of an agent's memory in a session of another id."""
        return agent if self.outlives(agent) else session + agent.removeprefix(self.id)


def write(file: BinaryIO, contents: Contents, agents: Iterable[BinaryIO]) -> None:
    """Write a session to a file that can be sought in; each of `agents` is a file that is at its start."""
    sums = []
    with tarfile.open(fileobj=file, mode="w") as archive:

        def add(name: str, source: BinaryIO) -> None:
            info = tarfile.TarInfo(name)
            info.size, info.mode = source.seek(0, io.SEEK_END), 0o600
            source.seek(0)
            digest = hashlib.sha256()
            for piece in iter(partial(source.read, PIECE), b""):
                digest.update(piece)
            sums.append(f"{digest.hexdigest()}  {name}\n")
            source.seek(0)
            archive.addfile(info, source)

        add(DOCUMENT, io.BytesIO(json.dumps(asdict(contents)).encode()))
        for number, source in enumerate(agents):
            add(agent_name(number), source)
        add(SUMS, io.BytesIO("".join(sums).encode()))


def agent_name(number: int) -> str:
    """Return the name of an agent's file in the archive."""
    return f"agents/{number}.agent"


def check_kind(source: BinaryIO) -> None:
    """Read the beginning of a file; BadRequest if it is an agent's."""
    if source.read(len(MAGIC)) == MAGIC:
        raise refused("it is an agent's file, so use `rekindle agents import`")


class Member:
    """One file of an archive as it is read: its name, and the digest of what was read of it."""

    def __init__(self, name: str, source: IO[bytes]) -> None:
        self.name = name
        self.digest = hashlib.sha256()
        self._source = source

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes; BadRequest if the archive ends here."""
        try:
            data = self._source.read(size)
        except tarfile.TarError as error:
            raise refused(f"it ends too early ({error})") from error
        self.digest.update(data)
        return data


def members(source: BinaryIO) -> Iterator[Member]:
    """Yield the files of an archive in order, each to be read before the next; BadRequest if it is damaged."""
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:
            for member in archive:
                opened = archive.extractfile(member) if member.isreg() and not member.issparse() else None
                if opened is None:
                    raise refused(f"{member.name!r} in it is no file")
                yield Member(member.name, opened)
    except (tarfile.TarError, EOFError) as error:
        raise refused(f"it is damaged, or no session's file ({error})") from error


def verified(source: BinaryIO) -> Contents:
    """Read a whole file and compare its digests; BadRequest if anything is damaged, missing or too much."""
    contents: Contents | None = None
    sums: list[str] = []
    for number, member in enumerate(members(source)):
        if member.name == SUMS:
            if contents is None or number != 1 + len(contents.agents):
                raise refused("files of its agents are missing")
            right = "".join(sums).encode()
            if member.read(len(right) + 1) != right:
                raise refused("its digests differ: it is damaged")
            return contents
        if number == 0 and member.name == DOCUMENT:
            contents = Contents.from_json(member.read(MOST_DOCUMENT))
        elif contents is not None and number <= len(contents.agents) and member.name == agent_name(number - 1):
            reader = AgentFileReader(cast("BinaryIO", member))
            for _ in reader.texts():
                pass
            reader.skip_blocks()
        else:
            raise refused(f"{member.name!r} in it belongs to no session")
        if member.read(1):
            raise refused(f"{member.name} is longer than a session's")
        sums.append(f"{member.digest.hexdigest()}  {member.name}\n")
    raise refused("it ends too early")
