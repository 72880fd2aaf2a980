"""The settings of the server: where it listens, who may connect, and what they may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rekindle.config.access import DEFAULT_NAMESPACE, check_keys, is_host, is_loopback
from rekindle.config.key_file import KeyFile
from rekindle.config.parts import MiB
from rekindle.config.setting import above, at_least, check_fields, need, setting


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where to listen, who may connect, and the limits."""

    host: str = setting(
        "127.0.0.1", "address to listen on; off loopback a key (REKINDLE_API_KEY) or `open` is required"
    )
    port: int = setting(7354, "port to listen on; 0 takes any free one", bounds=at_least(0, 65535))
    open: bool = setting(False, "serve other machines without a key")
    public_host: tuple[str, ...] = setting(
        (),
        "name under which a proxy in front is reached, for Host and Origin; may be given again",
        detail="With or without a port. See [proxy.md](proxy.md).",
        unset="none",
    )
    api_key: str | None = setting(None, "key of the namespace `default`", unset="none", given="secret")
    api_keys: Mapping[str, str] = setting(
        {},
        "key of each namespace: a table of names and keys, or name=key,name=key in the variable",
        unset="none",
        given="secret",
    )
    admin_key: str | None = setting(
        None, "key for all namespaces: figures, `?namespace=`", unset="none", given="secret"
    )
    key_file: Path | None = setting(
        None,
        "file of hashed keys and limits of namespaces, read again when it changes; `rekindle keys` writes it",
        detail="In addition to the keys above. See [operating.md](operating.md#keys-and-tenants).",
        unset="none",
    )
    served_model_name: str | None = setting(None, "name in /v1/models and in answers", unset="the model's")
    strict: bool = setting(
        False,
        "refuse images that the model cannot see, documents and unknown parameters, instead of leaving them out",
        detail="What is left out is named in the answer's `rekindle` object, in the log and by `rekindle why`.",
    )
    requests_per_minute: int | None = setting(
        None, "requests of each namespace in a minute; more are refused with 429", unset="no limit", bounds=at_least(1)
    )
    computed_tokens_per_day: int | None = setting(
        None,
        "tokens of prompts that are computed, not reused, for each namespace on a day (UTC); then 429",
        unset="no limit",
        bounds=at_least(1),
    )
    generated_tokens_per_day: int | None = setting(
        None, "tokens of replies for each namespace on a day (UTC); then 429", unset="no limit", bounds=at_least(1)
    )
    max_body_bytes: int = setting(32 * MiB, "largest request body", bounds=at_least(1))
    max_connections: int = setting(
        1024, "open connections; never more than the limit of open files allows", bounds=at_least(1)
    )
    max_connections_per_address: int | None = setting(
        None,
        "open connections from one address",
        detail="With a proxy on another machine in front, set it to `max_connections`.",
        unset="half; no limit from this machine",
        bounds=at_least(1),
    )
    read_timeout_s: float = setting(
        30.0, "longest wait for a request's head, and for more of its body", bounds=above(0)
    )
    stop_s: float = setting(5.0, "how long a stop waits for running answers", bounds=at_least(0))
    drain_s: float = setting(
        60.0,
        "how long a restart that hands the port over waits for running answers; new requests wait meanwhile",
        detail="See [operating.md](operating.md#a-restart-that-refuses-nothing).",
        bounds=at_least(0),
    )
    record: Path | None = setting(
        None,
        "write every request to this file or directory, to replay the day",
        detail="A directory must exist. See [replay.md](replay.md).",
        unset="off",
    )
    traces: bool = setting(
        False,
        "send a trace of each request to an OpenTelemetry collector, which the variables OTEL_* name",
        detail="Needs `rekindle[otel]`. See [operating.md](operating.md#traces).",
    )
    log_format: Literal["text", "json"] = setting("text", "lines for people, or one JSON object a line")
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "least severe lines to write; requests are info, failures of the server warning"
    )
    ping_s: float = 5.0  # a stream without new output sends a ping this often
    record_bytes: int = 1024 * MiB  # a record of this size is set aside for a new one, in place of the one before

    def __post_init__(self) -> None:
        check_fields(self)
        need(bool(self.host), "host is empty: write 127.0.0.1 for this machine only")
        need(self.served_model_name != "", "served_model_name is empty")
        check_keys(self.api_key, self.api_keys, self.admin_key)
        for name in self.public_host:
            need(is_host(name), f"public_host: {name!r} is no name: write llm.example or llm.example:8443")
        need(
            self.open or self.needs_key or not self.public_host,
            "public_host: others can reach it: set api_key (REKINDLE_API_KEY), or open=true to do without a key",
        )
        need(
            self.open or self.needs_key or is_loopback(self.host),
            f"{self.host} can be reached by others: set api_key (REKINDLE_API_KEY), or open=true to do without a key",
        )

    @property
    def needs_key(self) -> bool:
        """Whether a key is required."""
        return self.api_key is not None or bool(self.api_keys) or self.key_file is not None

    @property
    def separates(self) -> bool:
        """Whether keys separate tenants; else every caller may see everything."""
        return self.admin_key is not None or bool(self.api_keys) or self.key_file is not None

    def has_tenants(self) -> bool:
        """Whether there are, or a key file may come to name, several namespaces."""
        return self.key_file is not None or len(self.namespaces()) > 1

    def namespaces(self) -> tuple[str, ...]:
        """Every configured namespace, those of the key file as it is now; always includes `default`.

        ConfigError if that file cannot be read.
        """
        filed = () if self.key_file is None else KeyFile.read(self.key_file).namespaces()
        return tuple(dict.fromkeys((DEFAULT_NAMESPACE, *self.api_keys, *filed)))
