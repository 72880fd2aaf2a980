"""Sizes of hot memory, and the largest context it can serve."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.cache.blocks.windows import WindowSlots
from rekindle.config import CacheSettings, StoreSettings
from rekindle.errors import ConfigError
from rekindle.model.device import Memory
from rekindle.parts import LEAST_STATES, StatePart
from rekindle.spec import ModelSpec

# How hot memory is divided for models with windows and states: as for conversations of this length with this many
# resume points.
TYPICAL_TOKENS = 8192
TYPICAL_POINTS = 2


@dataclass(frozen=True, slots=True)
class HotSizes:
    """Blocks in hot memory, slots for the parts that end, and the tokens that a request may have."""

    num_blocks: int
    windows: tuple[WindowSlots, ...]
    max_context: int


def capacity(settings: CacheSettings, spec: ModelSpec, memory: Memory, *, chunk_tokens: int) -> HotSizes:
    """Return the sizes of hot memory; a request may have the model's context, or the tokens that the blocks hold.

    At least one request can run, `chunk_tokens` at a time.
    """
    layout, wanted = spec.layout, settings.hot_bytes or memory.hot_bytes(chunk_tokens)
    num_blocks = wanted // layout.block_bytes
    if num_blocks < 2:
        need = 2 * layout.block_bytes
        raise ConfigError(f"hot_bytes={wanted} holds less than two blocks of this model: give at least {need}")
    kinds, sizes = layout.ending.values(), [layout.parts[index].payload_bytes for index in layout.ending]
    least = [kind.least_slots(chunk_tokens, layout.block_tokens) for kind in kinds]
    kept = [kind.most_kept(TYPICAL_TOKENS, layout.block_tokens) for kind in kinds]
    shares = [min(1.0, TYPICAL_POINTS * count * layout.block_tokens / TYPICAL_TOKENS) for count in kept]
    per_block = layout.parts[0].payload_bytes + sum(share * size for share, size in zip(shares, sizes, strict=True))
    more = (wanted - sum(slots * size for slots, size in zip(least, sizes, strict=True))) / per_block
    num_blocks = max(num_blocks, int(more))
    slots = [min(num_blocks, max(count, int(share * num_blocks))) for count, share in zip(least, shares, strict=True)]
    if any(isinstance(kind, StatePart) and count < LEAST_STATES for kind, count in zip(kinds, slots, strict=True)):
        need = LEAST_STATES * layout.block_bytes
        raise ConfigError(
            f"hot_bytes={wanted} holds less than {LEAST_STATES} blocks with snapshots of recurrent state, which one "
            f"request may need: give at least {need}"
        )
    windows = tuple(
        WindowSlots(kind, num_slots=count + 1, num_blocks=num_blocks) for kind, count in zip(kinds, slots, strict=True)
    )
    # One block stays for the copy of a shared tail while its original is still held.
    return HotSizes(num_blocks, windows, min(spec.max_context, (num_blocks - 1) * layout.block_tokens))


def check_budget(settings: CacheSettings, device: str, memory: Memory) -> None:
    """Raise ConfigError if hot KV is set larger than the device's memory; checked before a model is loaded."""
    if settings.hot_bytes is not None and settings.hot_bytes > memory.total:
        raise ConfigError(
            f"hot_bytes={settings.hot_bytes} is more than the memory of {device}, {memory.total} bytes: give less, or "
            "leave it out to have it sized by the free memory"
        )


def check_disk(settings: StoreSettings, spec: ModelSpec) -> None:
    """Raise ConfigError if a disk budget holds less than one block: nothing could ever be saved."""
    least = spec.layout.block_bytes
    for name, given in (("disk_bytes", settings.disk_bytes), ("disk_writes_a_day", settings.disk_writes_a_day)):
        if given is not None and given < least:
            raise ConfigError(
                f"{name}={given} holds less than one block of this model: give at least {least}, or "
                "store=off to do without a disk"
            )
