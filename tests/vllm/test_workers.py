"""Tensor-parallel workers hand their heads to the owner of the store: records are those of one worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rekindle.cache.blocks.hashing import BlockIdentity, chain_hashes
from rekindle.errors import ConfigError
from rekindle_vllm.names import HeadShape, record_layout
from rekindle_vllm.ports import OwnerServer, SocketPort
from rekindle_vllm.requests import Reuse
from rekindle_vllm.shares import HeadCopies, HeadShare
from tests.vllm.engine import DEFAULT, StubEngine, reply_of
from tests.vllm.stored import RECORD, Stores, check_records, damage, prompt, records_of


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    made = Stores(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (4, 2)])
def test_records_are_the_same_whatever_the_number_of_workers(stores: Stores, writers: int, readers: int) -> None:
    ids = prompt(300)
    first = StubEngine(stores.open(), num_workers=writers)
    reply = first.serve("a", ids, 30)
    assert reply == reply_of(ids, 30)
    check_records(first.owner, ids + reply, 5)
    first.close()
    second = StubEngine(stores.open(), num_workers=readers)
    longer = ids + reply + prompt(40, 1)
    assert second.serve("b", longer, 3) == reply_of(longer, 3)
    assert second.reuse["b"] == Reuse(370, 0, 320, 0)
    assert second.owner.stats().blocks_read == 5  # once for all workers
    second.close()


def test_all_workers_compute_a_damaged_record_again(stores: Stores) -> None:
    ids = prompt(300)
    reply = StubEngine(stores.open()).serve("a", ids, 5)
    owner = stores.open()
    damage(stores.directory, records_of(owner, ids)[2])
    engine = StubEngine(owner, num_workers=2)
    assert engine.serve("b", ids, 5) == reply and engine.reuse["b"] == Reuse(300, 0, 128, 128)
    check_records(owner, ids, 4)
    engine.close()


def test_a_worker_that_has_fewer_records_limits_what_is_saved(stores: Stores) -> None:
    server, ports, key = served_save(stores)
    took: list[int] = []
    rows = [np.ones(HeadCopies(share, stores.opened[0].layout).payload_bytes, np.uint8) for share in SHARES]
    threads = [
        threading.Thread(
            target=lambda port=port, row=row, count=count: took.append(
                port.save(key, 0, [row] * count, time.monotonic() + 5)
            )
        )
        for port, row, count in zip(ports, rows, (2, 1), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert took == [1, 1]
    close(server, ports)


def test_a_worker_that_is_gone_keeps_no_other_waiting(stores: Stores) -> None:
    server, ports, key = served_save(stores)
    row = np.ones(HeadCopies(SHARES[0], stores.opened[0].layout).payload_bytes, np.uint8)
    took: list[int] = []
    waiting = threading.Thread(target=lambda: took.append(ports[0].save(key, 0, [row], time.monotonic() + 5)))
    waiting.start()
    while not server.num_meetings:
        time.sleep(0.001)
    ports[1].close()
    waiting.join(20)
    assert took == [0] and stores.opened[0].stats().blocks_written == 0
    close(server, ports)


def test_a_key_may_be_forgotten_as_soon_as_all_workers_have_their_answers(stores: Stores) -> None:
    server, ports, _ = served_save(stores)
    owner, row = stores.opened[0], np.empty(HeadCopies(SHARES[0], stores.opened[0].layout).payload_bytes, np.uint8)
    for _ in range(300):
        key = owner.plan_load([])
        assert [each.result(60) for each in [port.begin_load(key, 0, [row]) for port in ports]] == [0, 0]
        owner.forget([key])
    close(server, ports)


def test_a_worker_that_cannot_be_served_is_told_by_the_end_of_its_connection(stores: Stores) -> None:
    server, ports, _ = served_save(stores)
    with pytest.raises(EOFError):
        ports[0].begin_load(99, 0, []).result(60)
    close(server, ports)


SHARES = [HeadShare.of(2, rank, 2) for rank in range(2)]


def served_save(stores: Stores) -> tuple[OwnerServer, list[SocketPort], int]:
    """A server with two connected workers, and the key of a save of two records."""
    owner = stores.open()
    server = OwnerServer(owner, SHARES)
    ids = np.array(prompt(128), dtype=np.uint32)
    root = owner.root(DEFAULT)
    names = chain_hashes(root, ids, RECORD)
    blocks = [
        BlockIdentity(name, parent, root, ids[:RECORD]) for name, parent in zip(names, [root, *names], strict=False)
    ]
    return server, [SocketPort(owner.address, rank) for rank in range(2)], owner.plan_save(blocks)


def close(server: OwnerServer, ports: list[SocketPort]) -> None:
    for port in ports:
        port.close()
    server.close()


@pytest.mark.parametrize("record_format", ["native", "q4h"])
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_parts_of_all_workers_are_the_whole(record_format: str, workers: int) -> None:
    import torch

    layout = record_layout((HeadShape(4, 48, 16), HeadShape(4, 32, 32)), torch.bfloat16, record_format, 16)
    whole = np.random.default_rng(0).integers(0, 256, layout.parts[0].payload_bytes, dtype=np.uint8)
    rebuilt, covered = np.zeros_like(whole), np.zeros_like(whole)
    for rank in range(workers):
        share = HeadShare.of(4, rank, workers)
        copies = HeadCopies(share, layout)
        own = np.zeros(copies.payload_bytes, dtype=np.uint8)
        copies.cut(whole, own)
        if share.saves:
            copies.paste(own, rebuilt)
            copies.paste(np.ones_like(own), covered)
    assert np.array_equal(rebuilt, np.where(covered, whole, 0))
    assert covered.sum() == sum(
        section.num_bytes for each in layout.parts[0].sections for section in (*each.k, *each.v)
    )


def test_heads_that_workers_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor-parallel"):
        HeadShare.of(4, 0, 3)
