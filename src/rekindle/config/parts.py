"""The settings of each component and what they may be: names, defaults, bounds. Each default is written here, once."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rekindle.errors import ConfigError

MiB = 1 << 20


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _need_at_least(settings: object, **least: float) -> None:
    """Refuse fields below their least value; None means "decided later" and passes."""
    for name, low in least.items():
        value = getattr(settings, name)
        _need(value is None or value >= low, f"{name} must be at least {low}, not {value}")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model (None: the bundled one), in which precision, on which device. Remote code is never trusted."""

    model: str | None = None
    revision: str | None = None
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    device: str = "cpu"
    kv: Literal["auto", "q4h", "bf16", "fp32"] = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        _need(self.model is None or bool(self.model.strip()), "model is empty: name a directory or a hub model")
        _need(bool(self.device), "device is empty: write cpu or cuda")
        _need_at_least(self, threads=1)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Hot memory and matching. `hot_bytes` None: the engine sizes it by the memory at hand."""

    block_tokens: int = 64
    hot_bytes: int | None = None
    min_reuse_tokens: int = 16
    reuse: Literal["on", "off"] = "on"
    text_index_bytes: int = 256 * MiB
    max_branches: int = 8

    def __post_init__(self) -> None:
        size = self.block_tokens
        _need(16 <= size <= 256 and size & (size - 1) == 0, f"block_tokens must be 16, 32, 64, 128 or 256, not {size}")
        _need_at_least(self, hot_bytes=1, min_reuse_tokens=1, text_index_bytes=1, max_branches=1)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The warm tier. `dir` None: the user's cache directory; `disk_bytes` None: decided by the free space."""

    dir: Path | None = None
    enabled: bool = True
    disk_bytes: int | None = None
    staging_bytes: int = 64 * MiB
    readers: int = 2

    def __post_init__(self) -> None:
        _need_at_least(self, disk_bytes=1, staging_bytes=1, readers=1)

    def directory(self) -> Path:
        """`dir`, or where this system keeps a user's caches."""
        if self.dir is not None:
            return self.dir.expanduser().absolute()
        from platformdirs import user_cache_path

        return user_cache_path("rekindle")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Scheduling. `max_context` None: what the model was made for; `max_chunk_tokens` None: only time bounds it.

    `check_when_idle` re-derives every invariant of the engine whenever it runs out of work, for finding defects.
    """

    max_context: int | None = None
    max_stall_s: float = 0.25
    max_step_s: float = 1.0
    max_running: int = 32
    max_chunk_tokens: int | None = None
    check_when_idle: bool = False

    def __post_init__(self) -> None:
        _need_at_least(self, max_context=2, max_running=1, max_chunk_tokens=1)
        _need(self.max_stall_s > 0, f"max_stall_s must be above 0, not {self.max_stall_s}")
        _need(
            self.max_step_s >= self.max_stall_s,
            f"max_step_s ({self.max_step_s}) must not be below max_stall_s ({self.max_stall_s})",
        )


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where to listen (port 0: any free one) and who may come in."""

    host: str = "127.0.0.1"
    port: int = 7354
    served_model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    open: bool = False

    def __post_init__(self) -> None:
        _need(bool(self.host), "host is empty: write 127.0.0.1 for this machine only")
        _need(0 <= self.port <= 65535, f"port must be from 0 to 65535, not {self.port}")
        _need(self.served_model_name != "", "served_model_name is empty")
        _need(self.api_key != "", "api_key is empty")
        _need(
            self.open or self.api_key is not None or is_loopback(self.host),
            f"{self.host} can be reached from other machines: set REKINDLE_API_KEY, or say --open to do without a key",
        )
