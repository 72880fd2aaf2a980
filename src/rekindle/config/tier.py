"""The settings of the object tier."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.config.setting import at_least, check_fields, computing, setting


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The object tier, which several replicas share; there is none without a location."""

    location: str | None = computing(
        None,
        "directory or bucket through which replicas share memory: s3://, gs:// or az://",
        detail="Agents then resume on any replica with the same model and `REKINDLE_SECRET`. Credentials come from the "
        "environment, as for the service's own tools. See [fleet.md](fleet.md).",
        unset="none",
        name="tier",
    )
    num_bytes: int | None = setting(
        None,
        "bytes of KV in the object tier; beyond it the least recently used agents are dropped from it",
        detail="One replica looks every hour.",
        unset="no limit",
        bounds=at_least(1),
        name="tier_bytes",
    )
    ttl_s: float | None = setting(
        None,
        "drop agents from the object tier that were unused for this long",
        unset="never",
        bounds=at_least(1),
        name="tier_ttl_s",
    )
    wait_s: float = setting(
        0.0,
        "let a request wait this long for the object tier even where computing is faster",
        detail="Otherwise the tier is asked where loading is expected to take less time than computing, and may be "
        "silent for a sixteenth of that. More saves computing and costs time.",
        bounds=at_least(0),
        name="tier_wait_s",
    )

    def __post_init__(self) -> None:
        check_fields(self)
