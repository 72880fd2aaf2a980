"""Object tiers of rigs: what one has saved goes to a directory, and from there to the store of another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rekindle.config import TierSettings
from rekindle_tier.imports import Wanted
from rekindle_tier.tier import ObjectTier
from tests.exactness.rig import Rig


@contextmanager
def tier_of(rig: Rig, directory: Path) -> Iterator[ObjectTier]:
    """The tier in a directory, as this rig's store sees it."""
    assert rig.store is not None
    spec, settings = rig.loaded.spec, TierSettings(location=str(directory))
    tier = ObjectTier.open(settings, rig.store, fingerprint=spec.fingerprint, layout=spec.layout, max_branches=8)
    tier.start()
    try:
        yield tier
    finally:
        assert tier.stop(30.0)


def import_all(rig: Rig, tier: ObjectTier, agent: str) -> int:
    """Store all blocks of an agent's latest text, with every part that its head names; return how many."""
    assert rig.store is not None
    head = tier.imports.head("default", agent, compute_s=1000.0)
    assert head is not None
    branch, size = head.branches[0], rig.loaded.spec.layout.block_tokens
    wanted = [
        Wanted(block, (0, *(part for part, having in branch.parts.items() if at in having)))
        for at, block in enumerate(branch.blocks(size))
    ]
    fetched = list(tier.imports.blocks(wanted, rest_s=lambda num_come: 1000.0, num_named=len(wanted)))
    assert all(rig.store.stage(block) for block in fetched) and rig.store.flush(30.0)
    return len(fetched)
