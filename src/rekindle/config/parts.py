"""The settings of each component and what they may be: names, defaults, bounds. Each default is written here, once."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rekindle.config.keys import DEFAULT_NAMESPACE, check_keys
from rekindle.config.sizes import MOST
from rekindle.errors import ConfigError

MiB = 1 << 20
SESSIONS_FILE = "sessions.db"
RESPONSES_FILE = "responses.db"
MOST_THREADS = 1024  # a system that has no more threads to give ends the process
MOST_READERS = 64
WORDS_SHARE = 1 / 8  # of the disk, for coordination sessions, and again for kept responses


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_host(text: str) -> bool:
    """Whether `text` is a name or address, with a port or without, as a Host header spells it; IPv6 in brackets."""
    try:
        parts = urlsplit(f"//{text}")
        has_port = parts.port is not None
    except ValueError:
        return False
    name = parts.hostname or ""
    whole = (f"[{name}]" if ":" in name else name) + (f":{parts.port}" if has_port else "")
    is_name = re.fullmatch(r"[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?", name) is not None
    return (is_name or ":" in name) and whole == text.lower()


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _need_usual(settings: Any) -> None:
    """Refuse times that never come, and whole numbers that nothing can count to."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        if isinstance(value, float):
            _need(math.isfinite(value), f"{item.name} must be a finite number, not {value}")
        elif isinstance(value, int):
            _need(abs(value) <= MOST, f"{item.name} must be at most {MOST}, not a number of {len(str(value))} digits")


def _need_at_least(settings: object, **least: float) -> None:
    """Refuse fields below their least value, and numbers that are none; None means "decided later" and passes."""
    _need_usual(settings)
    for name, low in least.items():
        value = getattr(settings, name)
        _need(value is None or value >= low, f"{name} must be at least {low}, not {value}")


def _need_at_most(settings: object, **most: int) -> None:
    """Refuse fields above their greatest value; None passes."""
    for name, high in most.items():
        value = getattr(settings, name)
        _need(value is None or value <= high, f"{name} must be at most {high}, not {value}")


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
        _need_at_most(self, threads=MOST_THREADS)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Hot memory and matching. `hot_bytes` None: the engine sizes it by the memory at hand.

    A match is used when it has `min_reuse_tokens` and is at least `min_reuse_ratio` of the prompt. `eviction` names who
    leaves hot memory first.
    """

    block_tokens: int = 64
    hot_bytes: int | None = None
    min_reuse_tokens: int = 16
    min_reuse_ratio: float = 0.0
    reuse: Literal["on", "off"] = "on"
    text_index_bytes: int = 256 * MiB
    max_branches: int = 8
    eviction: Literal["lru", "fifo", "lfu", "aged-lfu", "adaptive"] = "lru"

    def __post_init__(self) -> None:
        size = self.block_tokens
        _need(16 <= size <= 256 and size & (size - 1) == 0, f"block_tokens must be 16, 32, 64, 128 or 256, not {size}")
        _need_at_least(self, hot_bytes=1, min_reuse_tokens=1, text_index_bytes=1, max_branches=1)
        _need(0 <= self.min_reuse_ratio <= 1, f"min_reuse_ratio must lie in 0 to 1, not {self.min_reuse_ratio}")


NORMALISATIONS = ("attribution", "dates", "tools")


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """What is done to prompts so that they stay the same from turn to turn.

    `normalise`: kinds of `NORMALISATIONS` separated by commas, or `off`. `anticipate`: compute in idle time what the
    template will render next.
    """

    normalise: str = "attribution"
    anticipate: Literal["on", "off"] = "on"

    def __post_init__(self) -> None:
        unknown = sorted(self.kinds() - set(NORMALISATIONS))
        known = ", ".join(NORMALISATIONS)
        _need(not unknown, f"normalise: {', '.join(map(repr, unknown))} is unknown: write off, or some of {known}")

    def kinds(self) -> frozenset[str]:
        """The kinds asked for; none with `off`."""
        if self.normalise.strip() == "off":
            return frozenset()
        return frozenset(kind.strip() for kind in self.normalise.split(","))


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The warm tier. `dir` None: the user's cache directory; `disk_bytes` None: decided by the free space.

    Agents that were not used for `agent_ttl_s` are forgotten (None: never), unnamed conversations after
    `anonymous_ttl_s`, other models' stores in the same directory after `stale_ttl_s`. A namespace that has
    more than `namespace_share` of the disk, or of hot memory, gives way there before others do. Within `disk_bytes`
    coordination sessions may take `session_bytes`, kept responses `response_bytes` (None: an eighth each), of which
    every tenant has an equal part.
    """

    dir: Path | None = None
    enabled: bool = True
    disk_bytes: int | None = None
    agent_ttl_s: float | None = None
    anonymous_ttl_s: float = 3600.0
    stale_ttl_s: float = 30 * 86400.0
    staging_bytes: int = 64 * MiB
    readers: int = 2
    namespace_share: float = 1.0
    session_bytes: int | None = None
    response_bytes: int | None = None

    def __post_init__(self) -> None:
        _need_at_least(self, disk_bytes=1, staging_bytes=1, readers=1)
        _need_at_most(self, readers=MOST_READERS)
        _need_at_least(self, session_bytes=1, response_bytes=1)
        words = (self.session_bytes or 0) + (self.response_bytes or 0)
        _need(
            self.disk_bytes is None or words <= self.disk_bytes,
            f"session_bytes and response_bytes are within disk_bytes ({self.disk_bytes}), and may not be {words}",
        )
        _need_at_least(self, agent_ttl_s=1, anonymous_ttl_s=1, stale_ttl_s=0)
        share = self.namespace_share
        _need(0 < share <= 1, f"namespace_share must be above 0 and at most 1 (1: no quota), not {share}")

    def directory(self) -> Path:
        """`dir`, or where this system keeps a user's caches."""
        if self.dir is not None:
            return self.dir.expanduser().absolute()
        from platformdirs import user_cache_path

        return user_cache_path("rekindle")

    def sessions_path(self) -> Path | None:
        """The file of sessions: words are data, so they lie beside the KV only where `dir` is given; None: nowhere."""
        if not self.enabled:
            return None
        if self.dir is not None:
            return self.directory() / SESSIONS_FILE
        from platformdirs import user_data_path

        return user_data_path("rekindle") / SESSIONS_FILE


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Scheduling. `max_context` None: what the model was made for; `max_chunk_tokens` None: only time bounds it.

    `max_running` places and hot memory are shared by the namespaces that ask (`engine/shares`). More than `max_waiting`
    requests that have not begun are refused as overload, but for a namespace that has less than its share of them
    (`engine/waiting`); what listeners of sessions take in is not counted, and turns that begin together are one. One
    that is not finished after `request_timeout_s` is stopped and fails (None: it may take as long as it takes).
    `check_when_idle` re-derives every invariant of the engine whenever it runs out of work, for finding defects.
    """

    max_context: int | None = None
    max_stall_s: float = 0.25
    max_step_s: float = 1.0
    max_running: int = 32
    max_chunk_tokens: int | None = None
    max_waiting: int = 1024
    request_timeout_s: float | None = None
    check_when_idle: bool = False

    def __post_init__(self) -> None:
        _need_at_least(self, max_context=2, max_running=1, max_chunk_tokens=1, max_waiting=1)
        timeout_s = self.request_timeout_s
        _need(timeout_s is None or timeout_s > 0, f"request_timeout_s must be above 0, not {timeout_s}")
        _need(self.max_stall_s > 0, f"max_stall_s must be above 0, not {self.max_stall_s}")
        _need(
            self.max_step_s >= self.max_stall_s,
            f"max_step_s ({self.max_step_s}) must not be below max_stall_s ({self.max_stall_s})",
        )


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where to listen (port 0: any free one), who may come in, and how much of it.

    `api_key` opens the namespace `default`, each key of `api_keys` the namespace of its name, `admin_key` what
    concerns all. One address may have `max_connections_per_address` of the connections (None: half of them, and from
    this machine, where a proxy may be, any number). A connection must have sent its request's head within
    `read_timeout_s`, and keep its body coming. A stop waits `stop_s` for running answers. A stream that has nothing to
    say yet gives a sign of life every `ping_s` seconds. Requests are written to `record`, a file or an existing
    directory; one that has grown to `record_bytes` is put aside and replaces the one put aside before.
    `public_host`: names, each with a port or without, by which a proxy in front is reached; Host and Origin may say
    them.
    """

    host: str = "127.0.0.1"
    port: int = 7354
    served_model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    open: bool = False
    requests_per_minute: int | None = None
    max_body_bytes: int = 32 * MiB
    max_connections: int = 1024
    max_connections_per_address: int | None = None
    read_timeout_s: float = 30.0
    stop_s: float = 5.0
    ping_s: float = 5.0
    record: Path | None = None
    record_bytes: int = 1024 * MiB
    public_host: tuple[str, ...] = ()
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        _need(bool(self.host), "host is empty: write 127.0.0.1 for this machine only")
        _need(0 <= self.port <= 65535, f"port must be from 0 to 65535, not {self.port}")
        _need(self.served_model_name != "", "served_model_name is empty")
        check_keys(self.api_key, self.api_keys, self.admin_key)
        for name in self.public_host:
            _need(is_host(name), f"public_host: {name!r} is no name: write llm.example or llm.example:8443")
        _need(
            self.open or self.needs_key or not self.public_host,
            "public_host names what others can reach: set REKINDLE_API_KEY, or say --open to do without a key",
        )
        _need(
            self.open or self.needs_key or is_loopback(self.host),
            f"{self.host} can be reached from other machines: set REKINDLE_API_KEY, or say --open to do without a key",
        )
        _need_at_least(self, requests_per_minute=1, max_body_bytes=1, record_bytes=1, stop_s=0)
        _need_at_least(self, max_connections=1, max_connections_per_address=1)
        _need(self.read_timeout_s > 0, f"read_timeout_s must be above 0, not {self.read_timeout_s}")
        _need(self.ping_s > 0, f"ping_s must be above 0, not {self.ping_s}")

    @property
    def needs_key(self) -> bool:
        """Whether nobody comes in without a key."""
        return self.api_key is not None or bool(self.api_keys)

    def namespaces(self) -> tuple[str, ...]:
        """Every namespace somebody may be in; `default` is one of them always."""
        return (DEFAULT_NAMESPACE, *(name for name in self.api_keys if name != DEFAULT_NAMESPACE))
