"""Collection deletes nothing that a head names and nothing young; purges of others are heard, and one collects."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.store.branch_text import BranchText
from rekindle_tier.collection import TOMBSTONE_S, YOUNG_S, Collection, Limits
from rekindle_tier.heads import AgentHead, NewerHead, decode_head
from rekindle_tier.location import open_location
from rekindle_tier.objects import Listed, Objects
from rekindle_tier.pace import Breaker, Pace
from rekindle_tier.sealing import Sealer, Version, block_name, head_name, purged_name
from rekindle_tier.tier import COLLECT_S, LEASE, Maintenance

BT = 4  # tokens of a block
ROOT = BlockHash(b"r" * 32)


class Tier:
    """A tier in a directory, with agents of made-up texts; everything in it is old unless it is written later."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.objects = Objects(open_location(str(directory)), Sealer(b"s" * 32), "model", directory=directory)

    def agent(
        self, name: str, *ids: int, last_use: float = 1.0, parts: Mapping[int, tuple[int, ...]] | None = None
    ) -> set[str]:
        """Write an agent with one branch and its objects; return their names."""
        branch = BranchText(ROOT, np.asarray(ids, dtype=np.uint32), 0, last_use, (), parts or {})
        self.objects.put(head_name(self.objects.sealer, "a", name), AgentHead("a", name, (branch,)).encode())
        names = set()
        for at, block in enumerate(branch.blocks(BT)):
            for part in (0, *(part for part, having in branch.parts.items() if at in having)):
                names.add(block_name(block.hash, part))
        self.objects.put_many([(each, b"x" * 1000) for each in names])
        return names

    def age(self, seconds: float) -> None:
        for path in (self.directory / "model").rglob("*"):
            then = time.time() - seconds
            os.utime(path, (then, then))

    def collection(self, *, num_bytes: int | None = None, ttl_s: float | None = None) -> Collection:
        return Collection(self.objects, BT, Limits(num_bytes, ttl_s))

    def names(self) -> set[str]:
        return {each.name for each in self.objects.list("blocks")}

    def head(self, name: str) -> AgentHead:
        got = self.objects.get(head_name(self.objects.sealer, "a", name))
        assert got is not None
        return decode_head(got[0])


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    opened = Tier(tmp_path / "tier")
    yield opened
    opened.objects.close()


def test_only_old_objects_that_no_head_names_are_deleted(tier: Tier) -> None:
    kept = tier.agent("ada", 1, 2, 3, 4, 5, 6, 7, 8, 9, parts={1: (1, 2)})
    tier.objects.put_many([("blocks/old.0", b"x"), ("blocks/old.1", b"x")])
    tier.age(YOUNG_S + 60)
    tier.objects.put("blocks/young.0", b"x")
    done = tier.collection().run()
    assert tier.names() == {*kept, "blocks/young.0"}
    assert (done.heads_emptied, done.objects_deleted) == (0, 2) and done.bytes_left > 5000


def test_what_is_written_again_while_it_is_looked_through_stays(tier: Tier) -> None:
    """An exporter that needs an old object writes it again, and its head after that."""
    tier.objects.put("blocks/old.0", b"x")
    tier.age(YOUNG_S + 60)

    class Writing(Objects):
        """Listings as always; right after one, another replica writes."""

        def list(self, folder: str, *, timeout_s: float = 60.0) -> list[Listed]:
            found = super().list(folder, timeout_s=timeout_s)
            tier.objects.put("blocks/old.0", b"x")
            return found

    objects = Writing(open_location(str(tier.directory)), Sealer(b"s" * 32), "model", directory=tier.directory)
    assert Collection(objects, BT, Limits()).run().objects_deleted == 0
    objects.close()
    assert tier.names() == {"blocks/old.0"}


def test_agents_that_were_unused_for_too_long_are_dropped(tier: Tier) -> None:
    now = time.time()
    tier.agent("old", 1, 2, 3, 4, 5, last_use=now - 1000)
    kept = tier.agent("new", 1, 2, 3, 4, 6, last_use=now - 10)
    tier.age(YOUNG_S + 60)
    assert tier.collection(ttl_s=100.0).run().heads_emptied == 1
    assert tier.names() == kept and tier.head("old").branches == () and len(tier.head("new").branches) == 1


def test_beyond_its_bytes_the_least_recently_used_agents_are_dropped(tier: Tier) -> None:
    agents = [tier.agent(f"agent-{at}", *range(4), at, at, last_use=float(at)) for at in range(6)]
    tier.age(YOUNG_S + 60)
    assert len(tier.names()) == 7, "the first block is shared"
    size = next(iter(tier.objects.list("blocks"))).num_bytes
    assert tier.collection(num_bytes=7 * size).run().heads_emptied == 0
    done = tier.collection(num_bytes=4 * size).run()
    assert (done.heads_emptied, done.objects_deleted, done.bytes_left) == (3, 3, 4 * size)
    assert tier.names() == agents[3] | agents[4] | agents[5]


def test_a_head_that_is_written_meanwhile_is_not_emptied(tier: Tier) -> None:
    tier.agent("ada", 1, 2, 3, 4, 5)

    class Busy(Objects):
        """Each head is written once more after it was read."""

        def get(self, name: str, *, timeout_s: float = 60.0) -> tuple[bytes, Version] | None:
            got = super().get(name, timeout_s=timeout_s)
            tier.agent("ada", 1, 2, 3, 4, 5, 6, last_use=2.0)
            return got

    objects = Busy(open_location(str(tier.directory)), Sealer(b"s" * 32), "model", directory=tier.directory)
    assert Collection(objects, BT, Limits(ttl_s=1.0)).run().heads_emptied == 0
    objects.close()
    assert len(tier.head("ada").branches) == 1


def test_a_damaged_head_names_nothing_and_stops_nothing(tier: Tier) -> None:
    tier.agent("ada", 1, 2, 3, 4, 5)
    kept = tier.agent("eve", 6, 7, 8, 9)
    (tier.directory / "model" / head_name(tier.objects.sealer, "a", "ada")).write_bytes(b"damaged")
    tier.age(YOUNG_S + 60)
    tier.collection().run()
    assert tier.names() == kept


def test_nothing_is_deleted_while_a_newer_version_writes(tier: Tier) -> None:
    """What its heads name is not known here."""
    kept = tier.agent("ada", 1, 2, 3, 4, 5)
    written = json.loads(tier.head("ada").encode()) | {"v": 2}
    tier.objects.put(head_name(tier.objects.sealer, "a", "ada"), json.dumps(written).encode())
    tier.age(YOUNG_S + 60)
    with pytest.raises(NewerHead):
        tier.collection().run()
    eve = tier.agent("eve", 1, 2, 3, 4, 6)
    with pytest.raises(NewerHead):
        tier.collection().delete_unshared(tier.head("eve"))
    assert tier.names() == kept | eve


def test_what_only_a_purged_agent_has_is_deleted_at_once(tier: Tier) -> None:
    tier.agent("ada", 1, 2, 3, 4, 5, parts={1: (1,)})
    kept = tier.agent("eve", 1, 2, 3, 4, 6)
    head = tier.head("ada")
    tier.objects.put(head_name(tier.objects.sealer, "a", "ada"), head.purged(2.0).encode())
    assert tier.collection().delete_unshared(head) == (2, 1)
    assert tier.names() == kept


def test_old_tombstones_are_deleted(tier: Tier) -> None:
    tier.objects.put(purged_name(tier.objects.sealer, "a", "ada"), b"1")
    tier.collection().run()
    assert len(tier.objects.list("purged")) == 1
    tier.age(TOMBSTONE_S + 60)
    tier.collection().run()
    assert tier.objects.list("purged") == []


def maintenance(tier: Tier) -> Maintenance:
    return Maintenance(tier.objects, tier.collection(), Breaker(time.monotonic), Pace())


def test_purges_of_others_are_heard_once_each(tier: Tier) -> None:
    heard: list[tuple[str, str, float]] = []
    one = maintenance(tier)
    one.connect(lambda: [("a", "ada"), ("a", "eve")], lambda *purged: heard.append(purged))
    one.forget_purged()
    assert heard == []
    for agent, at in (("ada", 5.0), ("stranger", 6.0)):
        tier.objects.put(purged_name(tier.objects.sealer, "a", agent), str(at).encode())
    one.forget_purged()
    one.forget_purged()
    assert heard == [("a", "ada", 5.0)]
    tier.objects.put(purged_name(tier.objects.sealer, "a", "ada"), b"7.5")
    one.forget_purged()
    assert heard[1:] == [("a", "ada", 7.5)], "it was purged again"


def test_one_replica_collects_in_an_hour(tier: Tier) -> None:
    one, other = maintenance(tier), maintenance(tier)
    one.collect_if_due()
    other.collect_if_due()
    assert one.collected is not None and other.collected is None
    tier.objects.put(LEASE, str(time.time() - COLLECT_S - 1).encode())
    other.collect_if_due()
    assert other.collected is not None
    (tier.directory / "model" / LEASE).write_bytes(b"damaged")
    one.collected = None
    one.collect_if_due()
    assert one.collected is not None, "a damaged lease is taken over"
