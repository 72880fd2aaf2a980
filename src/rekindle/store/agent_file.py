"""An agent as one file: what it remembers, without anything of the machine that it comes from.

Owns the bytes of the file. Has its texts, as token ids and as bytes, and their KV as stores have it, without names of
blocks, which depend on a namespace and a store's secret. Knows no engine, and not who may read it.

    "RKAGENT\\n" | u16 version | frames, each: kind u8, u32 length, content
        H    whose memory it is and what computed it, as JSON
        I T  for each branch, the one used last first: its token ids u32, and their bytes
        B    for each block, parents first: u32 branch, u32 number there, u32 parts as bits | the payload of each part
        E    SHA-256 of everything before

Integers are little-endian. A reader takes nothing on trust: it knows how long a frame may be before it reads it, has
one frame in memory at a time, and ends without an error only at a digest that agrees, with nothing after it. The digest
finds damage, no forger: who can write a file can write its digest. `sealed_file` finds both.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import BinaryIO

import numpy as np

from rekindle.cache.blocks.hashing import TokenIds, id_bytes
from rekindle.errors import BadRequest
from rekindle.spec import ModelSpec
from rekindle.store.values import Bytes

MAGIC = b"RKAGENT\n"
SEALED, _SESSION = b"RKSEALED", b"session."  # how an encrypted file begins, and the archive of a session
VERSION = 1
MOST_HEAD = 4 << 20  # bytes of the JSON
MOST_TEXT = 4096  # characters of a name in it
MOST_TOKEN = 256  # bytes of a token, on average over a branch
CHUNK = 1 << 20  # bytes that are read together
_VERSION = struct.Struct("<H")
_FRAME = struct.Struct("<cI")
_BLOCK = struct.Struct("<III")
_DIGEST_BYTES = 32


def _what_it_is(start: bytes) -> str:
    """Return what another file of ours is, by its beginning, and what takes it; nothing for any other."""
    if start.startswith(SEALED):
        return ": it is encrypted, so import it by `rekindle agents import` with its passphrase"
    return ": it is a session's, so use `rekindle sessions import`" if start.startswith(_SESSION) else ""


def refused(why: str) -> BadRequest:
    """Return the error for a file that cannot be taken in."""
    return BadRequest(f"the file is not imported, and nothing has changed: {why}", param="file")


@dataclass(frozen=True, slots=True)
class FileHead:
    """Whose memory a file is, what computed it, and the sizes of what follows.

    `num_tokens` and `turn_ends` are those of each branch; `part_bytes` the payload of each part of a block. `identity`
    is the fingerprint in hexadecimal; `made_from` names what it depends on, as far as that is known.
    """

    agent: str
    model: str
    identity: str
    made_from: Mapping[str, str]
    block_tokens: int
    part_bytes: tuple[int, ...]
    num_tokens: tuple[int, ...]
    turn_ends: tuple[tuple[int, ...], ...]

    @property
    def most_blocks(self) -> int:
        """How many blocks its texts have, where branches share none."""
        return sum(-(-num // self.block_tokens) for num in self.num_tokens)

    @classmethod
    def of(cls, agent: str, spec: ModelSpec, texts: Sequence[FileText]) -> FileHead:
        """Return the head for an agent of a model with these texts."""
        layout = spec.layout
        return cls(
            agent=agent,
            model=spec.name,
            identity=spec.fingerprint.hex(),
            made_from={
                **spec.made_from,
                "kv": ", ".join(layout.formats()),
                "block_tokens": str(layout.block_tokens),
            },
            block_tokens=layout.block_tokens,
            part_bytes=tuple(part.payload_bytes for part in layout.parts),
            num_tokens=tuple(len(text.ids) for text in texts),
            turn_ends=tuple(text.turn_ends for text in texts),
        )


@dataclass(frozen=True, slots=True, eq=False)
class FileText:
    """One branch: its ids u32 [num_tokens], the bytes that they stand for, and where its turns ended, in tokens."""

    ids: TokenIds
    content: bytes
    turn_ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FileBlock:
    """Block `number` of a branch: the payload of each of its parts, without those that are not stored."""

    branch: int
    number: int
    payloads: Mapping[int, Bytes]


def written(head: FileHead, texts: Iterable[FileText], blocks: Iterable[FileBlock]) -> Iterator[bytes]:
    """Yield the bytes of a file, piece by piece; blocks that another branch has, too, come once."""
    digest = hashlib.sha256()
    for piece in _pieces(head, texts, blocks):
        digest.update(piece)
        yield piece
    yield _FRAME.pack(b"E", _DIGEST_BYTES) + digest.digest()


def _pieces(head: FileHead, texts: Iterable[FileText], blocks: Iterable[FileBlock]) -> Iterator[bytes]:
    described = json.dumps(asdict(head)).encode()
    yield MAGIC + _VERSION.pack(VERSION) + _FRAME.pack(b"H", len(described)) + described
    for text in texts:
        yield _FRAME.pack(b"I", 4 * len(text.ids)) + id_bytes(text.ids)
        yield _FRAME.pack(b"T", len(text.content)) + text.content
    for block in blocks:
        payloads = sorted(block.payloads.items())
        parts = sum(1 << part for part, _ in payloads)
        num_bytes = _BLOCK.size + sum(payload.nbytes for _, payload in payloads)
        yield _FRAME.pack(b"B", num_bytes) + _BLOCK.pack(block.branch, block.number, parts)
        for _, payload in payloads:
            yield payload.tobytes()


class AgentFileReader:
    """Reads a file once, from its start: `head`, then all `texts`, then all `blocks`. BadRequest says what is wrong."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._digest = hashlib.sha256()
        self._num_blocks = 0
        start = self._take(len(MAGIC) + _VERSION.size)
        if start[: len(MAGIC)] != MAGIC:
            raise refused(f"this is no agent's file{_what_it_is(start)}")
        (version,) = _VERSION.unpack(start[len(MAGIC) :])
        if version != VERSION:
            raise refused(f"it is of version {version}, and this Rekindle reads {VERSION}: update the older one")
        self.head = _head(self._frame(b"H", most=MOST_HEAD))

    def texts(self) -> Iterator[FileText]:
        """Yield the branches in order. Ids are as they stand there: whether a model has them is not known here."""
        for num_tokens, turn_ends in zip(self.head.num_tokens, self.head.turn_ends, strict=True):
            data = self._frame(b"I", most=4 * num_tokens, least=4 * num_tokens)
            content = self._frame(b"T", most=MOST_TOKEN * num_tokens)
            yield FileText(np.frombuffer(data, dtype="<u4").astype(np.uint32), content, turn_ends)

    def blocks(self) -> Iterator[FileBlock]:
        """Yield the blocks in order, then compare the digest."""
        while (num_bytes := self._next_block()) is not None:
            yield self._block(num_bytes)

    def skip_blocks(self) -> int:
        """Compare the digest without looking into the blocks; return how many bytes they have."""
        total = 0
        while (num_bytes := self._next_block()) is not None:
            total += sum(map(len, self._chunks(num_bytes)))
        return total

    def _next_block(self) -> int | None:
        """Return the size of the block that follows; None at the end of the file, whose digest agrees."""
        before = self._digest.copy()
        kind, num_bytes = self._frame_head()
        if kind == b"B":
            self._num_blocks += 1
            if self._num_blocks > self.head.most_blocks:
                raise refused("it is damaged: it has more blocks than its texts")
            return num_bytes
        if kind != b"E":
            raise refused(f"it is damaged: a frame {kind!r} where a block or the end should be")
        self._end(num_bytes, before.digest())
        return None

    def _block(self, num_bytes: int) -> FileBlock:
        sizes = self.head.part_bytes
        branch, number, bits = _BLOCK.unpack(self._take(_BLOCK.size))
        parts = [part for part in range(len(sizes)) if bits >> part & 1]
        is_whole = bits >> len(sizes) == 0 and bits & 1 and branch < len(self.head.num_tokens)
        if not is_whole or num_bytes != _BLOCK.size + sum(sizes[part] for part in parts):
            raise refused("it is damaged: a block has other parts or sizes than its head says")
        return FileBlock(
            branch, number, {part: np.frombuffer(self._take(sizes[part]), dtype=np.uint8) for part in parts}
        )

    def _end(self, num_bytes: int, digest: bytes) -> None:
        if num_bytes != _DIGEST_BYTES or self._take(_DIGEST_BYTES) != digest:
            raise refused("it is damaged: its digest differs")
        if self._source.read(1):
            raise refused("it is damaged: there is more after its end")

    def _frame(self, kind: bytes, *, most: int, least: int = 0) -> bytes:
        found, num_bytes = self._frame_head()
        if found != kind or not least <= num_bytes <= most:
            raise refused(f"it is damaged: a frame {found!r} of {num_bytes:,} bytes where {kind!r} should be")
        return self._take(num_bytes)

    def _frame_head(self) -> tuple[bytes, int]:
        kind, num_bytes = _FRAME.unpack(self._take(_FRAME.size))
        return kind, num_bytes

    def _take(self, num_bytes: int) -> bytes:
        return b"".join(self._chunks(num_bytes))

    def _chunks(self, num_bytes: int) -> Iterator[bytes]:
        """Read so many bytes; memory grows with what comes, not with what a frame claims."""
        while num_bytes:
            piece = self._source.read(min(CHUNK, num_bytes))
            if not piece:
                raise refused("it ends too early")
            self._digest.update(piece)
            num_bytes -= len(piece)
            yield piece


def _head(data: bytes) -> FileHead:
    """Return the head in this JSON; BadRequest if any of it has another shape."""
    try:
        read = json.loads(data)
        head = FileHead(
            agent=_text(read["agent"]),
            model=_text(read["model"]),
            identity=_text(read["identity"]),
            made_from={_text(name): _text(value) for name, value in read["made_from"].items()},
            block_tokens=_count(read["block_tokens"]),
            part_bytes=tuple(map(_count, read["part_bytes"])),
            num_tokens=tuple(map(_count, read["num_tokens"])),
            turn_ends=tuple(tuple(_count(end, least=0) for end in ends) for ends in read["turn_ends"]),
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise refused(f"it is damaged: its head cannot be read ({type(error).__name__})") from error
    ordered = all(list(ends) == sorted(ends) for ends in head.turn_ends)
    within = all(
        not ends or (ends[-1] <= num and len(ends) <= num)
        for ends, num in zip(head.turn_ends, head.num_tokens, strict=False)
    )
    is_sound = len(head.turn_ends) == len(head.num_tokens) > 0 and 0 < len(head.part_bytes) <= 32
    if not (ordered and within and is_sound):
        raise refused("it is damaged: its head contradicts itself")
    return head


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise TypeError("no name")
    value.encode()  # a lone surrogate is none either
    return value


def _count(value: object, *, least: int = 1) -> int:
    if type(value) is not int or not least <= value < 1 << 32:
        raise ValueError("no count")
    return value
