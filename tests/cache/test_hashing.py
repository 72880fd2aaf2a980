"""Names of blocks: fixed digests, since they name files on disk, and what must tell two names apart."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache import BlockHash, block_hash, chain_hashes, root_hash, tail_hash

ROOT = root_hash(fingerprint=b"fp", namespace="default", cache_salt="", secret=bytes(range(32)))
id_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(lambda ids: np.array(ids, np.uint32))
parents = st.binary(min_size=32, max_size=32).map(BlockHash)
Fields = tuple[bytes, str, str, bytes]
fields = st.tuples(st.binary(max_size=6), st.text(max_size=4), st.text(max_size=4), st.binary(max_size=6))


def root_of(given_fields: Fields) -> BlockHash:
    fingerprint, namespace, cache_salt, secret = given_fields
    return root_hash(fingerprint=fingerprint, namespace=namespace, cache_salt=cache_salt, secret=secret)


def test_golden_digests() -> None:
    ids = np.arange(8, dtype=np.uint32)
    assert ROOT.hex() == "df14dbd951def3521803761fdbc03004ec769acda8340e6447f7827df1d8bd7f"
    assert [name.hex() for name in chain_hashes(ROOT, ids, 4)] == [
        "c17d3c78f34bb6ee239f6874c91621c8ffab17fd3120e838a4e14646bb84cdda",
        "7d426480f36931984a9bf99347f1e701159e94428576f4a3d317448b43e519e0",
    ]
    assert tail_hash(ROOT, ids[:3]).hex() == "5e59abc6f4d8105a161be0a557e1bab44bc1ce84ccef2273a3438fe5809b3ae5"


def test_the_layout_is_the_documented_one() -> None:
    spelled = b"".join(len(f).to_bytes(8, "little") + f for f in (b"fp", b"default", b"", bytes(range(32))))
    assert hashlib.blake2b(spelled, digest_size=32, person=b"rekindle.root").digest() == ROOT
    data = ROOT + (7).to_bytes(4, "little") + (70_000).to_bytes(4, "little")
    ids = np.array([7, 70_000], np.uint32)
    assert hashlib.blake2b(data, digest_size=32, person=b"rekindle.block").digest() == block_hash(ROOT, ids)
    assert hashlib.blake2b(data, digest_size=32, person=b"rekindle.tail").digest() == tail_hash(ROOT, ids)


@given(fields, fields)
def test_roots_agree_only_when_every_field_does(
    a: tuple[bytes, str, str, bytes], b: tuple[bytes, str, str, bytes]
) -> None:
    assert (root_of(a) == root_of(b)) == (a == b)


def test_a_byte_moved_between_fields_is_another_root() -> None:
    assert root_of((b"ab", "c", "", b"")) != root_of((b"a", "bc", "", b""))
    assert root_of((b"", "ab", "", b"")) != root_of((b"", "a", "b", b""))


@given(parents, id_lists, st.integers(1, 9))
def test_a_chain_is_block_hash_after_block_hash(parent: BlockHash, ids: np.ndarray, block_tokens: int) -> None:
    names = chain_hashes(parent, ids, block_tokens)
    assert len(names) == len(ids) // block_tokens
    for i, name in enumerate(names):
        assert name == block_hash(parent, ids[i * block_tokens : (i + 1) * block_tokens])
        parent = name


@given(parents, parents, id_lists, id_lists)
def test_names_differ_with_parent_ids_and_kind(p: BlockHash, q: BlockHash, a: np.ndarray, b: np.ndarray) -> None:
    assert (block_hash(p, a) == block_hash(q, b)) == (p == q and np.array_equal(a, b))
    assert block_hash(p, a) != tail_hash(p, a)


def test_a_slice_with_a_stride_counts_as_its_values() -> None:
    ids = np.arange(16, dtype=np.uint32)
    assert block_hash(ROOT, ids[::2]) == block_hash(ROOT, ids[::2].copy())


def test_ids_are_whole_numbers_of_32_bits_in_whatever_they_come() -> None:
    for ids in (np.arange(4, dtype=np.int64), np.arange(4, dtype=">u4"), [0, 1, 2, 3], range(4)):
        assert block_hash(ROOT, ids) == block_hash(ROOT, np.arange(4, dtype=np.uint32))
    for wrong in (np.arange(-1, 3), np.zeros(4), np.zeros((2, 2), np.uint32), [1.5], [1 << 32], b"abcd", 7):
        with pytest.raises(ValueError, match=r"ids|array"):
            block_hash(ROOT, wrong)
