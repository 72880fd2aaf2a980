"""The connector's settings: `kv_connector_extra_config` of the engine's transfer config."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rekindle.config import DEFAULT_NAMESPACE, StoreSettings, parse_size
from rekindle.errors import ConfigError
from rekindle.keywords import did_you_mean
from rekindle_vllm.names import RecordFormat

MiB = 1 << 20
RECORD_TOKENS = 64
LEAST_TOKENS = 16
MOST_READERS = 8  # by default; each reads, checks and copies about 1 GB/s
PLACE = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """Where records are kept and in which form.

    `dir`: directory of the store; `{dp_rank}` in it stands for the number of a data-parallel engine. `format`: native
    keeps the engine's bits, q4h 4 bits of them. `disk`, `writes_a_day`, `staging`: sizes as `20GiB` (None: as our own
    engine's).
    `readers`: threads that read (None: half of the cores, 2 to 8).
    `block_tokens`: of a record (None: 64, the engine's blocks if they are larger, less where states or windows ask it).
    `patience_ms`: how long a step waits for a disk that cannot keep up before what is left is saved in a later one.
    `namespaces`: those whose agents a rebuild of a damaged index finds again. `model`: the model's directory (None: the
    engine's).
    """

    dir: str
    format: RecordFormat = "native"
    disk: int | str | None = None
    writes_a_day: int | str | None = None
    staging: int | str = 512 * MiB
    readers: int | None = None
    block_tokens: int | None = None
    patience_ms: int = 50
    namespaces: tuple[str, ...] = (DEFAULT_NAMESPACE,)
    model: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> BridgeSettings:
        """Settings from what the operator wrote; ConfigError that names the field."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(f"{PLACE}: there is no {name!r}{did_you_mean(name, known)}")
        if not isinstance(given.get("dir"), str) or not given["dir"]:
            raise ConfigError(f'{PLACE}: dir is the directory that records are kept in, as in {{"dir": "/data/kv"}}')
        if given.get("format", "native") not in ("native", "q4h"):
            raise ConfigError(f"{PLACE}: format is native or q4h, not {given['format']!r}")
        for name, least in (("readers", 1), ("patience_ms", 0), ("block_tokens", 1)):
            value = given.get(name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(f"{PLACE}: {name} is a whole number from {least} on, not {value!r}")
        namespaces = given.get("namespaces", [DEFAULT_NAMESPACE])
        if isinstance(namespaces, str) or not all(isinstance(name, str) for name in namespaces):
            raise ConfigError(f"{PLACE}: namespaces is a list of names, not {namespaces!r}")
        return cls(**{**given, "namespaces": tuple(namespaces)})

    def store(self, dp_rank: int) -> StoreSettings:
        """The store's own settings, of a data-parallel engine with this number."""
        return StoreSettings(
            dir=Path(self.dir.replace("{dp_rank}", str(dp_rank))).expanduser(),
            disk_bytes=None if self.disk is None else parse_size(self.disk),
            disk_writes_a_day=None if self.writes_a_day is None else parse_size(self.writes_a_day),
            staging_bytes=parse_size(self.staging),
            readers=self.readers or min(MOST_READERS, max(2, (os.cpu_count() or 2) // 2)),
        )

    def record_tokens(
        self, blocks: Sequence[int], states: Sequence[int] = (), windows: Sequence[tuple[int, int]] = ()
    ) -> int:
        """Tokens of a record for an engine whose groups have blocks of these tokens, and a state after each of these.

        `windows`: the tokens of a block and of the window, of each group that has one. ConfigError if they do not fit
        together.
        """
        wanted = self.block_tokens or max(RECORD_TOKENS, blocks[0] if len(blocks) == 1 and not states else 0)
        if self.block_tokens is None:
            while wanted > LEAST_TOKENS and any(tokens % wanted for tokens in states):
                wanted //= 2
            halves = (size for size in (wanted, wanted // 2, wanted // 4) if size >= LEAST_TOKENS)
            wanted = next((size for size in halves if all(_is_held(size, *each) for each in windows)), wanted)
        if not LEAST_TOKENS <= wanted <= 256 or wanted & (wanted - 1):
            raise ConfigError(
                f"records of {wanted} tokens: they have 16 to 256, a power of two; run the engine with --block-size 64"
            )
        if len(blocks) == 1 and not states and wanted % blocks[0]:
            raise ConfigError(
                f"a record of {wanted} tokens does not consist of the engine's blocks of {blocks[0]}: run it with "
                "--block-size 16, 32 or 64"
            )
        if any(tokens % wanted for tokens in states):
            raise ConfigError(
                f"the engine keeps states after multiples of {max(states)} tokens, which are not ends of records of "
                f"{wanted}: choose another --block-size, or block_tokens that divides it"
            )
        return wanted


def _is_held(record: int, block: int, window: int) -> bool:
    """Whether an engine that decodes token by token still holds all records of a window when the last one is full."""
    needed = -(-(window - 1) // block) * block
    return -(-needed // record) * record <= -(-window // block) * block
