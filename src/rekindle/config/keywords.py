"""The settings as Python keyword arguments, for type checkers; made by `python -m tools.reference keywords`.

Sizes may be text ("4GiB"), paths may be text, lists of names may be one text with commas. None means "not given".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict


class SettingsWithoutModel(TypedDict, total=False):
    """Every setting except the model, named as in flags and files; `store` is a directory, or "off"."""

    revision: str | None
    device: str
    dtype: Literal["auto", "bf16", "fp32"]
    kv: Literal[
        "auto", "q4h", "q8h", "bf16", "fp32", "q4h/q8h", "q8h/q4h", "bf16/q4h", "bf16/q8h", "q4h/bf16", "q8h/bf16"
    ]
    weights: Literal["native", "int8", "int4", "auto", "bnb-4bit", "bnb-8bit"]
    kernels: Literal["auto", "amx", "avx512", "avxvnni", "avx2", "torch"]
    sampling: Literal["model", "openai"]
    threads: int | None
    hot_bytes: int | str | None
    block_tokens: int
    reuse: Literal["on", "off"]
    max_branches: int
    normalise: str
    tail_heading: str | Sequence[str]
    anticipate: Literal["on", "off"]
    store: str | Path | None
    slot: str | int
    secret: str | None
    store_key: str | None
    store_key_file: str | Path | None
    disk_bytes: int | str | None
    disk_writes_a_day: int | str | None
    agent_ttl_s: float | None
    anonymous_ttl_s: float
    save_unnamed: Literal["reused", "always"]
    namespace_share: float
    check_restored: int
    tier: str | Path | None
    tier_bytes: int | str | None
    tier_ttl_s: float | None
    tier_wait_s: float
    max_context: int | None
    max_running: int
    max_waiting: int
    request_timeout_s: float | None
    max_stall_s: float
    max_chunk_tokens: int | None
    speculate: Literal["auto", "off"]
    backend: str | None
    backend_model: str | None
    backend_key: str | None
    backend_flags: str | None
    backend_slots: str | Path | None
    host: str
    port: int
    open: bool
    public_host: str | Sequence[str]
    api_key: str | None
    api_keys: Mapping[str, str]
    admin_key: str | None
    key_file: str | Path | None
    served_model_name: str | None
    strict: bool
    requests_per_minute: int | None
    computed_tokens_per_day: int | None
    generated_tokens_per_day: int | None
    max_body_bytes: int | str
    max_connections: int
    max_connections_per_address: int | None
    read_timeout_s: float
    stop_s: float
    drain_s: float
    record: str | Path | None
    traces: bool
    log_format: Literal["text", "json"]
    log_level: Literal["debug", "info", "warning", "error"]
    models: str | Path | None
    keep_alive: str
    max_loaded: int


class SettingsKeywords(SettingsWithoutModel, total=False):
    """Every setting; `model` is a directory or a hub name, None the bundled one."""

    model: str | Path | None
