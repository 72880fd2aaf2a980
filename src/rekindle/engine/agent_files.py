"""Agents as files: one agent of a running engine written to a file, and one made from a file.

An import reads its file twice, and once more if a purge meanwhile took out its blocks. First all of it, down to its
digest: until then nothing is looked at, and what is damaged is refused as that. Then its texts, each of which is
refused unless its ids stand for the same bytes here, and its blocks, which go to the store under names of this
namespace. The agent exists once the store has noted its branches, all of them in one transaction; until then there are
blocks without an owner, as after a turn that was cancelled.

Owns which KV an engine takes from a file: what the same model has computed, in the same form. Called from any thread
except the engine's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, Literal, NamedTuple

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.agent_admin import AgentAdmin
from rekindle.engine.components import Components
from rekindle.engine.memory.adoption import Adoption, known_branch
from rekindle.engine.memory.branches import KnownBranch
from rekindle.engine.memory.sequences import stored_record
from rekindle.engine.types import Imported
from rekindle.errors import StoreError
from rekindle.store.agent_file import AgentFileReader, FileBlock, FileHead, FileText, refused, written
from rekindle.store.branch_text import BranchText
from rekindle.store.reading import located, payloads_of
from rekindle.store.values import BlockBytes, SequenceRecord, StoredBlock
from rekindle.store.warm import WarmStore
from rekindle.text.pictures import is_known

Kv = Literal["same_model", "off"]
READ_BYTES = 8 << 20  # of blocks that are read together for a file
WAIT_S, SLOWEST = 60.0, 4 << 20  # how long an import may take: so long, and a second for so many bytes
EARLIER_S = 1e-3  # between the last uses of two branches, whose order is kept


class AgentFiles:
    """One agent of an engine, to a file and from one. StoreError without a store, or if the disk refuses."""

    def __init__(self, parts: Components, namespace: str, agent: str) -> None:
        self._parts = parts
        self._namespace = namespace
        self._agent = agent
        self._admin = AgentAdmin(parts, namespace, agent)
        self._size = parts.spec.layout.block_tokens

    def export(self) -> Iterator[bytes]:
        """Return the pieces of its file, read from the disk as they are taken; NotFound if it has no memory.

        It is as of now: what changes meanwhile is not in it, and KV that is gone by then is left out.
        """
        store, _ = self._store()
        branches = self._admin.saved()
        texts = [self._text(branch) for branch in branches]
        head = FileHead.of(self._agent, self._parts.spec, texts)
        return written(head, texts, self._blocks(store, branches) if self._parts.has_kv else ())

    def _store(self) -> tuple[WarmStore, Adoption]:
        if self._parts.store is None or self._parts.adoption is None:
            raise StoreError("without a store agents are neither exported nor imported: start the engine with one")
        return self._parts.store, self._parts.adoption

    def _text(self, branch: KnownBranch) -> FileText:
        ends = tuple(sorted(end for end in branch.turn_ends if end <= branch.num_tokens))
        return FileText(branch.ids, self._content(branch.ids), ends)

    def _content(self, ids: np.ndarray) -> bytes:
        return b"".join(map(self._parts.encoder.vocabulary.token_bytes, ids.tolist()))

    def _blocks(self, store: WarmStore, branches: Sequence[KnownBranch]) -> Iterator[FileBlock]:
        """Yield what is stored of the branches, each block once, parents first."""
        seen = {branch.root for branch in branches}
        for at, branch in enumerate(branches):
            chain = located(store, list(BranchText(branch.root, branch.ids, 0, 0.0).blocks(self._size)))
            fresh = [(number, block) for number, block in enumerate(chain) if block.identity.hash not in seen]
            for number, block in _read(store, fresh, self._parts.spec.layout.block_bytes):
                if block.identity.parent in seen:
                    seen.add(block.identity.hash)
                    yield FileBlock(at, number, block.payloads)

    def take_in(self, open_file: Callable[[], BinaryIO], *, kv: Kv = "same_model") -> Imported:
        """Make the agent from a file, which is opened two or three times; durable when this returns.

        BadRequest with the reason if the file is damaged or cannot be used here, or if the agent has a memory already:
        nothing has changed then. `kv` "off": its texts alone, so that all KV is computed here.
        """
        store, adoption = self._store()
        self._admin.check_new()
        with open_file() as source:
            num_bytes = self._verify(AgentFileReader(source))
        come = self._staged(store, adoption, open_file, num_bytes, kv)
        try:
            self._admin.take_in(come.branches, come.records)
        except StoreError:  # a purge, of anybody, takes out blocks that no branch has yet
            come = self._staged(store, adoption, open_file, num_bytes, kv)
            self._admin.take_in(come.branches, come.records)
        return come.imported

    def _staged(
        self, store: WarmStore, adoption: Adoption, open_file: Callable[[], BinaryIO], num_bytes: int, kv: Kv
    ) -> _Come:
        """Read a verified file; its blocks are on disk when this returns."""
        with open_file() as source:
            reader = AgentFileReader(source)
            without_kv = "it was left out, as asked" if kv == "off" else self._other_kv(reader.head)
            branches = self._branches(reader)
            chains = _Chains(branches, self._size)
            if without_kv is None:
                self._check_room(store, num_bytes)
                blocks = chains.named(reader.blocks())
            else:
                blocks = chains.named(iter(())) if self._parts.has_kv else chains.named(self._blank(chains))
            num_staged = adoption.blocks(blocks, timeout_s=WAIT_S + num_bytes / SLOWEST)
            if num_staged < chains.num_named:
                raise StoreError("the agent is not imported: the store's disk takes its blocks too slowly; try again")
        longest = max(branches, key=lambda branch: branch.num_tokens)
        kv_tokens = 0 if without_kv is not None else chains.num_tokens(longest.number)
        imported = Imported(self._agent, longest.num_tokens, kv_tokens, without_kv)
        return _Come(branches, chains.records(), imported)

    def _verify(self, reader: AgentFileReader) -> int:
        """Read a file to its end; return the bytes of its blocks. BadRequest if it is damaged, or too long for here."""
        head, most = reader.head, self._parts.memory.book.max_branches
        if len(head.num_tokens) > most:
            raise refused(f"it has {len(head.num_tokens)} branches, and an agent keeps {most} here (max_branches)")
        if max(head.num_tokens) > self._parts.max_context:
            raise refused(
                f"it has a text of {max(head.num_tokens):,} tokens, and prompts have {self._parts.max_context:,} here: "
                "serve with a larger context (max_context)"
            )
        for _ in reader.texts():
            pass
        return reader.skip_blocks()

    def _other_kv(self, head: FileHead) -> str | None:
        """Return why the KV of a file cannot be used here; None if it can."""
        if not self._parts.has_kv:
            return "another server computes here, and has its own"
        ours = FileHead.of("", self._parts.spec, ())
        if head.identity != ours.identity:
            names = [name for name, value in ours.made_from.items() if head.made_from.get(name, value) != value]
            differing = f" (these differ: {', '.join(names)})" if names else ""
            return f"it was computed by {head.model!r}, which is not what computes here{differing}"
        if (head.block_tokens, head.part_bytes) != (ours.block_tokens, ours.part_bytes):
            raise refused("its head contradicts itself: blocks of this model have other sizes")
        return None

    def _branches(self, reader: AgentFileReader) -> list[KnownBranch]:
        """Return the texts as branches of the agent, if this model reads the same in their ids."""
        root, now = self._parts.core.cache.root(self._namespace), time.time()
        branches = []
        for number, text in enumerate(reader.texts()):
            if not is_known(text.ids, self._parts.spec.vocab_size) or self._content(text.ids) != text.content:
                raise refused(
                    "its token ids mean other texts to the model that is served here than to "
                    f"{reader.head.model!r}: serve that one, or another with its tokenizer"
                )
            canonical = self._parts.encoder.canonical_tokens(text.ids)
            found = BranchText(root, text.ids, canonical, now - number * EARLIER_S, text.turn_ends)
            branches.append(known_branch(self._namespace, self._agent, number, found, self._size))
        return branches

    def _check_room(self, store: WarmStore, num_bytes: int) -> None:
        most = store.stats().disk_bytes
        if num_bytes > most:
            raise refused(f"it has {num_bytes:,} bytes of KV, and the store {most:,} in all (disk_bytes)")
        if not store.takes_blocks:
            raise StoreError("nothing is written today any more (disk_writes_a_day): import the agent tomorrow")

    def _blank(self, chains: _Chains) -> Iterator[FileBlock]:
        """Yield blocks that stand for texts alone, as a front keeps them."""
        parts = self._parts.spec.layout.parts
        empty = {part.index: np.zeros(part.payload_bytes, dtype=np.uint8) for part in parts}
        return (FileBlock(branch, number, empty) for branch, number in chains.missing())


class _Come(NamedTuple):
    """What came with a file: branches, and as far as their blocks are on disk their records."""

    branches: list[KnownBranch]
    records: list[SequenceRecord]
    imported: Imported


class _Chains:
    """The blocks of some branches, named as here, and which of them have come."""

    def __init__(self, branches: Sequence[KnownBranch], block_tokens: int) -> None:
        self._branches = branches
        self._size = block_tokens
        self._blocks = [list(BranchText(each.root, each.ids, 0, 0.0).blocks(block_tokens)) for each in branches]
        self._come: set[BlockHash] = set()

    @property
    def num_named(self) -> int:
        """Blocks that have come."""
        return len(self._come)

    def named(self, blocks: Iterable[FileBlock]) -> Iterator[BlockBytes]:
        """Yield these blocks under their names; BadRequest for one without a place, or before its parent."""
        for block in blocks:
            chain = self._blocks[block.branch]
            if block.number >= len(chain):
                raise refused("it has a block after the end of its text")
            identity = chain[block.number]
            if identity.hash in self._come or not (identity.parent == identity.root or identity.parent in self._come):
                raise refused("its blocks are out of order")
            self._come.add(identity.hash)
            yield BlockBytes(identity, block.payloads)

    def missing(self) -> Iterator[tuple[int, int]]:
        """Yield the branch and number of each block that has not come, parents first."""
        for branch, chain in enumerate(self._blocks):
            for number, identity in enumerate(chain):
                if identity.hash not in self._come:
                    yield branch, number

    def num_tokens(self, branch: int) -> int:
        """Leading tokens of a branch whose blocks have come."""
        num_tokens = 0
        for identity in self._blocks[branch]:
            if identity.hash not in self._come:
                break
            num_tokens += identity.num_tokens
        return num_tokens

    def records(self) -> list[SequenceRecord]:
        """Return the branches as far as their blocks have come, without those of which none has."""
        ends = [(each, self.num_tokens(number)) for number, each in enumerate(self._branches)]
        return [stored_record(branch, end, self._size) for branch, end in ends if end]


def _read(
    store: WarmStore, blocks: Sequence[tuple[int, StoredBlock]], block_bytes: int
) -> Iterator[tuple[int, BlockBytes]]:
    """Yield these blocks, each with its number, as far as the disk has them."""
    at_once = max(1, READ_BYTES // block_bytes)
    for start in range(0, len(blocks), at_once):
        run = blocks[start : start + at_once]
        found = payloads_of(store, [block for _, block in run])
        for (number, block), payloads in zip(run, found, strict=False):
            yield number, BlockBytes(block.identity, payloads)
        if len(found) < len(run):
            return
