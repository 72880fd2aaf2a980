"""Sizes of hot memory, and the largest context it can serve."""

from __future__ import annotations

import os

import torch

from rekindle.config import HOT_SHARE, MOST_HOT_BYTES, CacheSettings, StoreSettings
from rekindle.errors import ConfigError
from rekindle.model.device import total_bytes
from rekindle.spec import ModelSpec


def capacity(settings: CacheSettings, spec: ModelSpec, device: str) -> tuple[int, int]:
    """Return the blocks in hot memory, and the tokens a request may have: the model's context, or what they hold."""
    wanted = hot_budget(settings, device)
    num_blocks = wanted // spec.layout.block_bytes
    if num_blocks < 2:
        need = 2 * spec.layout.block_bytes
        raise ConfigError(f"hot_bytes={wanted} holds less than two blocks of this model: give at least {need}")
    # One block stays for the copy of a shared tail while its original is still held.
    return num_blocks, min(spec.max_context, (num_blocks - 1) * spec.layout.block_tokens)


def check_budget(settings: CacheSettings, device: str) -> None:
    """Raise ConfigError if hot KV is set larger than the device's memory; checked before a model is loaded."""
    most = total_bytes(device)
    if settings.hot_bytes is not None and settings.hot_bytes > most:
        raise ConfigError(
            f"hot_bytes={settings.hot_bytes} is more than the memory of {device}, {most} bytes: give less, or leave "
            "it out to have it sized by the free memory"
        )


def check_disk(settings: StoreSettings, spec: ModelSpec) -> None:
    """Raise ConfigError if the disk budget holds less than one block: nothing could ever be saved."""
    least = spec.layout.block_bytes
    if settings.disk_bytes is not None and settings.disk_bytes < least:
        raise ConfigError(
            f"disk_bytes={settings.disk_bytes} holds less than one block of this model: give at least {least}, or "
            "store=off to do without a disk"
        )


def hot_budget(settings: CacheSettings, device: str) -> int:
    """Return the bytes hot KV may take: the setting, else a share of the free memory."""
    return settings.hot_bytes or min(MOST_HOT_BYTES, int(HOT_SHARE * free_bytes(device)))


def free_bytes(device: str) -> int:
    """Return the free memory of the device, or of this machine."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
