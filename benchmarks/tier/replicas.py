"""Replicas of one model on one directory: each has a slot of its store, and all may share a tier."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.errors import RekindleError
from rekindle_tier.tier import ObjectTier

SECRET = "the secret of a benchmark"
EXPORT_S = 600.0


@contextmanager
def replica(flags: Mapping[str, Any], directory: Path, slot: int, tier: Path | str | None) -> Iterator[Engine]:
    """Run an engine in a slot of the store in `directory`."""
    own = {**flags, "store": str(directory / "store"), "slot": str(slot), "secret": SECRET, "anticipate": "off"}
    with Engine(Settings.load(own if tier is None else {**own, "tier": str(tier)})) as engine:
        yield engine


def tier_of(engine: Engine) -> ObjectTier:
    """Return the tier of a replica that has one."""
    tier = engine.components.tier
    assert isinstance(tier, ObjectTier), "the replica has no tier"
    return tier


def export(engine: Engine) -> None:
    """Wait until all that has ended is in the tier; RekindleError if that takes too long."""
    if not engine.flush(EXPORT_S) or not tier_of(engine).exports.flush(EXPORT_S):
        raise RekindleError(f"a replica could not export within {EXPORT_S:g} s")


@contextmanager
def silent_copy(tier: Path, directory: Path) -> Iterator[Path]:
    """Yield a directory with an object for each of the tier's, whose readers wait until the end of the block."""
    paths = [directory / path.relative_to(tier) for path in tier.rglob("*") if path.is_file()]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
    try:
        yield directory
    finally:
        for path in paths:
            if path.is_fifo():
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
                path.unlink()
