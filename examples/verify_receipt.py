"""Verify a receipt against the files of a store, without Rekindle: needs only Python's own library, and for an
encrypted store the package `cryptography`.

    rekindle receipt ID --json > receipt.json
    python examples/verify_receipt.py receipt.json ~/.cache/rekindle [--template chat_template.jinja] [--key-file FILE]

From the last block that an answer read, and from the one that holds its end, it goes back to the first: the record of
each is where the index says, both its checksums hold, its hash is that of its parent and token ids, and the chain
begins at the root of namespace and model. Prints what is wrong. Exit code 0: verified; 1: something is wrong; 2: blocks
are missing, the rest is verified. docs/receipts.md says how the files are laid out. The key of an encrypted store is in
the file, or in the variable REKINDLE_STORE_KEY, as the server has it.
"""

import argparse
import hashlib
import json
import os
import sqlite3
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

# magic, version, part, header bytes, block tokens, tokens, layers, payload crc, payload bytes; hashes: layout, block,
# parent, root. After them a byte for each layer; ids u32 from the next multiple of 4 on; at the header's end its crc32
FIXED = struct.Struct("<8sHHIIIIIQ32s32s32s32s")
MAGIC, VERSION = b"RKBLOCK\n", 1
KEYS_MAGIC, ENTRY_BYTES = b"RKKEYS1\n", 92  # of the file `secret` of an encrypted store: nonce, secret, data key, tag


class Wrong(Exception):
    """Something of a block is not as it has to be; the message names it."""


@dataclass(frozen=True)
class Block:
    """What the index says of one block, and where its records are: (part, slot, crc of the payload, key and tag)."""

    name: bytes
    parent: bytes
    root: bytes
    ids: bytes  # u32 little-endian; empty if they do not open
    places: list[tuple[int, int, int, bytes]]


def chained(person: bytes, parent: bytes, ids: bytes) -> bytes:
    return hashlib.blake2b(parent + ids, digest_size=32, person=person).digest()


def root_of(fingerprint: bytes, namespace: str, secret: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=32, person=b"rekindle.root")
    for part in (fingerprint, namespace.encode(), b"", secret):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def derived(key: bytes, person: bytes, keyed: bytes = b"") -> bytes:
    return hashlib.blake2b(key, digest_size=32, key=keyed, person=person).digest()


def opened(key: bytes, nonce: bytes, sealed: bytes, bound: bytes) -> bytes | None:
    """Return what AES-256-GCM sealed for this place; None if that is another value."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(nonce, sealed, bound)
    except (InvalidTag, ValueError):
        return None


def keys_of(directory: Path, key_file: Path | None) -> tuple[bytes, bytes | None]:
    """Return the secret of a store, and of an encrypted one the key of what its index seals."""
    content = (directory / "secret").read_bytes()
    if not content.startswith(KEYS_MAGIC):
        return content, None
    key = key_file.read_text("ascii") if key_file else os.environ.get("REKINDLE_STORE_KEY")
    if key is None:
        sys.exit(f"{directory} is encrypted: give its key as REKINDLE_STORE_KEY, or the file that has it as --key-file")
    master = derived(bytes.fromhex(key.strip()), b"rekindle.wrap")
    for at in range(len(KEYS_MAGIC) + 1, len(content), ENTRY_BYTES):
        entry = content[at : at + ENTRY_BYTES]
        held = opened(master, entry[:12], entry[12:], KEYS_MAGIC)
        if held is not None:
            return held[:32], derived(derived(b"index", b"rekindle.veil", held[32:]), b"rekindle.sealed")
    sys.exit(f"{directory} is encrypted with another key than this one")


class Store:
    """The files of one model in a store's directory. `key`: of what the index of an encrypted one seals."""

    def __init__(self, directory: Path, key: bytes | None) -> None:
        self.directory, self.key = directory, key
        self.index = sqlite3.connect(f"{(directory / 'index.db').absolute().as_uri()}?mode=ro", uri=True)

    def block(self, name: bytes) -> Block | None:
        query = "SELECT part, slot, crc, parent, root, ids, num_tokens FROM block WHERE name = ? ORDER BY part"
        rows = self.index.execute(query, (name,)).fetchall()
        if not rows or rows[0][0] != 0:
            return None
        held = [self.ids(name, row[0], *row[5:]) for row in rows]
        places = [(*row[:3], seal) for row, (_, seal) in zip(rows, held, strict=True)]
        return Block(name, rows[0][3], rows[0][4], held[0][0], places)

    def ids(self, name: bytes, part: int, column: bytes, num_tokens: int) -> tuple[bytes, bytes]:
        """Return the token ids that a row has, and key and tag of its record; both empty if they do not open."""
        if self.key is None:
            return column, b""
        sealed, bound = column[4 * num_tokens :], b"block.ids" + name + part.to_bytes(4, "little")
        held = opened(self.key, sealed[:12], sealed[12:], bound) or b""
        return held[: 4 * num_tokens], held[4 * num_tokens :]

    def longer(self, tail: bytes, parent: bytes, num_tokens: int) -> Block | None:
        """Return the block that took a tail's place: its first ids are the tail's, by its hash."""
        query = "SELECT name, part, ids, num_tokens FROM block WHERE parent = ? AND part = 0"
        children = [(row[0], self.ids(*row)[0]) for row in self.index.execute(query, (parent,))]
        found = (name for name, ids in children if chained(b"rekindle.tail", parent, ids[: 4 * num_tokens]) == tail)
        return next((self.block(name) for name in found), None)

    def record(self, name: bytes, part: int, slot: int, seal: bytes) -> tuple[str, bytes]:
        """Return the place of a block's record in words, and its bytes."""
        slots, _, _ = shape_of(self.directory / f"blocks-{part}-000.safetensors")
        path = self.directory / f"blocks-{part}-{slot // slots:03d}.safetensors"
        _, record_bytes, data = shape_of(path)
        with path.open("rb") as file:
            file.seek(data + slot % slots * record_bytes)
            found = file.read(record_bytes)
        where = f"{path.name} slot {slot}"
        if len(found) < record_bytes:
            raise Wrong(f"{where} is cut off")
        if self.key is None:
            return where, found
        plain = opened(seal[:32], bytes(12), found + seal[32:], name + struct.pack("<IQ", part, slot))
        if plain is None:
            raise Wrong(f"{where} does not open: it was changed, or is another record, or an older one")
        return where, plain

    def verify(self, block: Block, block_tokens: int) -> None:
        """Raise Wrong unless every record of a block is whole and its own, and its hash follows from its ids."""
        person = b"rekindle.block" if len(block.ids) == 4 * block_tokens else b"rekindle.tail"
        if chained(person, block.parent, block.ids) != block.name:
            raise Wrong("its hash is not that of its parent and token ids, as the index has them")
        for part, slot, crc, seal in block.places:
            where, record = self.record(block.name, part, slot, seal)
            verify_record(block, part, crc if self.key is None else None, record, where)


def shape_of(path: Path) -> tuple[int, int, int]:
    """Return the number of slots in a file, the bytes of each, and where the first begins."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            slots, record_bytes = json.loads(file.read(min(length, 1 << 20)))["blocks"]["shape"]
        return slots, record_bytes, 8 + length
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Wrong(f"{path.name} cannot be read: {error!r}") from error


def verify_record(block: Block, part: int, crc: int | None, record: bytes, where: str) -> None:
    fields = FIXED.unpack_from(record)
    magic, version, of_part, header_bytes, _, num_tokens, num_layers, payload_crc = fields[:8]
    if magic != MAGIC or version != VERSION:
        raise Wrong(f"{where} holds no record that is known here")
    if not FIXED.size < header_bytes <= len(record):
        raise Wrong(f"{where}: its header is damaged")
    (header_crc,) = struct.unpack_from("<I", record, header_bytes - 4)
    if zlib.crc32(record[: header_bytes - 4]) != header_crc:
        raise Wrong(f"{where}: the checksum of its header does not hold")
    if zlib.crc32(record[header_bytes:]) != payload_crc:
        raise Wrong(f"{where}: the checksum of its KV does not hold")
    begin = -(-(FIXED.size + num_layers) // 4) * 4
    ids = record[begin : begin + 4 * num_tokens]
    if (of_part, *fields[10:13]) != (part, block.name, block.parent, block.root) or ids != block.ids:
        raise Wrong(f"{where} holds another block: {fields[10].hex()}")
    if crc not in (None, payload_crc):  # in an encrypted store the tag says it
        raise Wrong(f"{where} holds other KV of this block than the index says")


def walk(store: Store, name: bytes, root: bytes) -> Iterator[tuple[bytes, Block | None]]:
    """Yield hash and block from `name` back to the first; None for one that is missing, which ends it."""
    while name != root:
        block = store.block(name)
        yield name, block
        if block is None:
            return
        name = block.parent


def verify_chain(store: Store, link: dict[str, Any], root: bytes, size: int) -> tuple[list[str], set[str]]:
    """Return what is wrong with the blocks that end with a link of a receipt, and those that are missing."""
    wrong, missing, rest = list[str](), set[str](), (link["tokens"] - 1) % size + 1
    last, parent = bytes.fromhex(link["hash"]), bytes.fromhex(link["parent"])
    most = link["tokens"] // size + 1  # parents in a tampered index may form a circle
    before = list(islice(walk(store, parent, root), most))
    if all(block for _, block in before) and len(before) * size + rest != link["tokens"]:
        wrong.append(f"{link['tokens']} tokens, and {len(before)} blocks before the last one")
    for name, block in [(last, store.block(last) or store.longer(last, parent, rest)), *before]:
        try:
            if block is None:
                missing.add(name.hex())
            elif block.root != root or (name == last and block.parent != parent):
                raise Wrong("it is of another namespace, model or chain")
            else:
                store.verify(block, size)
        except Wrong as error:
            wrong.append(f"block {name.hex()}: {error}")
    return wrong, missing


def verify_choice(store: Store, choice: dict[str, Any], root: bytes, size: int) -> tuple[list[str], set[str]]:
    """Return what is wrong with what a choice read and where it ended, and the blocks that are missing."""
    if bytes.fromhex(choice["root"]) != root:
        return ["the root is not that of this namespace, model and secret"], set()
    wrong, missing, read, computed = list[str](), set[str](), choice["read"], choice["computed"]
    if read["tokens"] + computed["prompt"] != choice["prompt_tokens"] or computed["first"] != read["tokens"]:
        wrong.append("what was read and what was computed do not add up to the prompt")
    if read["hot_tokens"] + read["warm_tokens"] != read["tokens"]:
        wrong.append("what was read from memory and from disk does not add up to what was read")
    listed = sum(block["tokens"] for block in choice["blocks"])
    if listed > read["tokens"] or (choice["is_whole"] and listed < read["tokens"]):
        wrong.append("the blocks that are listed do not add up to what was read")
    end, head = choice["prompt_tokens"] + computed["reply"], choice["head"]["tokens"]
    is_cut = choice["finish_reason"] == "cancelled" and head < end  # perhaps within the prompt
    ends = (0,) if choice["reuse"] == "off" else (end, end - 1, end // size * size, (end - 1) // size * size)
    if not is_cut and head not in ends:  # the last token of a reply may not have been computed, nor a tail kept
        wrong.append("the last block does not end with the reply")
    for link in (read, choice["head"]):
        if link["tokens"] and link["hash"] is None:
            missing.add(f"that ends at token {link['tokens']}, which the receipt does not name")
        elif link["tokens"]:
            found, lacking = verify_chain(store, link, root, size)
            wrong, missing = wrong + found, missing | lacking
    return wrong, missing


def main() -> int:
    parser = argparse.ArgumentParser(description="Verify a receipt against the files of a store.")
    parser.add_argument("receipt", type=Path, help="what `rekindle receipt ID --json` prints")
    parser.add_argument("store", type=Path, help="the store's directory, or a slot in it")
    parser.add_argument("--template", type=Path, help="the chat template that should have made the prompt")
    parser.add_argument("--key-file", type=Path, help="the file with the key of an encrypted store")
    given = parser.parse_args()
    receipt = json.loads(given.receipt.read_text("utf-8"))
    identity, wrong, missing, count = receipt["identity"], list[str](), set[str](), 0
    if given.template and hashlib.sha256(given.template.read_bytes()).hexdigest() not in identity["templates"].values():
        wrong.append(f"{given.template} is not the template that made the prompt")
    (secret, key), fingerprint = keys_of(given.store, given.key_file), bytes.fromhex(identity["fingerprint"])
    if not (given.store / identity["fingerprint"] / "index.db").is_file():
        sys.exit(f"{given.store} has nothing of the model {identity['fingerprint']}")
    store = Store(given.store / identity["fingerprint"], key)
    wrong += [] if receipt["choices"] else ["there is no choice"]
    for choice in receipt["choices"]:
        root = root_of(fingerprint, receipt["namespace"], secret)
        found, lacking = verify_choice(store, choice, root, identity["block_tokens"])
        wrong += [f"choice {choice['index']}: {each}" for each in found]
        missing |= lacking
        count += choice["read"]["tokens"]
    for line in (*wrong, *(f"not in the store, evicted or never written: block {name}" for name in sorted(missing))):
        print(line)
    what = "" if identity.get("holds", "kv") == "kv" else f"; by their ids alone, their KV is {identity['backend']}'s"
    print(f"{receipt['id']}: {'NOT ' if wrong or missing else ''}verified, {count} tokens that were read{what}")
    return 1 if wrong else 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
