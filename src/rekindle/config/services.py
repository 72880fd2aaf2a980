"""The settings of services next to this process: a server that computes in our place, an object tier that replicas
share, servers of several models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

from rekindle.config.setting import at_least, check_fields, computing, need, parse_duration, setting
from rekindle.errors import ConfigError

BackendKind = Literal["vllm", "llama.cpp", "openai"]
KINDS: tuple[BackendKind, ...] = get_args(BackendKind)
CLOUDS = {"s3": "s3://bucket/prefix", "gs": "gs://bucket/prefix", "az": "az://container/prefix"}
STARTED: tuple[BackendKind, ...] = ("vllm", "llama.cpp")  # what is started here where no URL is given


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """The server that computes; there is none without an address, and then this process computes."""

    address: str | None = setting(
        None,
        "the server that computes: vllm=URL or llama.cpp=URL; without a URL one is started; openai=URL is another that "
        "takes token ids",
        detail="Needs the package `rekindle-backends`. This server then loads no weights and keeps texts and agents. "
        "See [vllm.md](vllm.md#the-front) and [llama-cpp.md](llama-cpp.md).",
        unset="this process computes",
        name="backend",
    )
    model: str | None = setting(
        None,
        "name of the model at the backend",
        unset="the only one it lists, or that of the model",
        name="backend_model",
    )
    key: str | None = setting(None, "key for the backend", unset="none", given="secret", name="backend_key")
    flags: str | None = setting(
        None,
        "more flags of `vllm serve` or `llama-server`, for one that is started here",
        detail="In one text, as on its command line.",
        unset="none",
        name="backend_flags",
    )
    slots: Path | None = setting(
        None,
        "folder to which a llama-server at a URL saves its slots, on this machine: what they compute is then kept",
        detail="See [llama-cpp.md](llama-cpp.md#one-that-runs-already).",
        unset="texts alone are kept",
        name="backend_slots",
    )
    silence_s: float = 600.0  # a request is given up when the backend sends nothing for this long

    def __post_init__(self) -> None:
        check_fields(self)
        need(
            self.flags is None or self.is_own,
            "backend_flags: these are for a server that is started here: backend=vllm or backend=llama.cpp",
        )
        need(
            self.slots is None or (self.address or "").startswith("llama.cpp="),
            "backend_slots: this is for a llama-server that runs already: backend=llama.cpp=URL",
        )
        if self.address is None or self.is_own:
            return
        kind, _, url = self.address.partition("=")
        need(
            kind in KINDS and bool(url),
            f"backend: {self.address!r} is no backend: write vllm=http://HOST:PORT or llama.cpp=http://HOST:PORT, vllm "
            "or llama.cpp to start one here, or openai=http://HOST:PORT for another server that takes token ids",
        )
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
        need(is_url, f"backend: {url!r} is no URL: write it as http://HOST:PORT")
        need(parts.username is None, "backend: the URL may hold no key: set backend_key (REKINDLE_BACKEND_KEY)")

    @property
    def is_own(self) -> bool:
        """Whether a server is to be started here."""
        return self.address in STARTED

    @property
    def keeps_slots(self) -> bool:
        """Whether what a llama-server has computed is kept here."""
        return self.address == "llama.cpp" or self.slots is not None

    @property
    def says_progress(self) -> bool:
        """Whether it is known how far a prompt is while it is computed: of vLLM and others only when it is done."""
        return self.address is None or self.kind == "llama.cpp"

    @property
    def kind(self) -> BackendKind:
        """What kind of server it is; only with an address."""
        assert self.address is not None, "there is no backend"
        return next(kind for kind in KINDS if kind == self.address.partition("=")[0])

    @property
    def url(self) -> str:
        """Its base URL, without `/v1`; only with an address that has one."""
        assert self.address is not None and not self.is_own, "there is no URL"
        return self.address.partition("=")[2].rstrip("/").removesuffix("/v1")


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
        if self.location is not None:
            directory_of(self.location)


def directory_of(location: str) -> Path | None:
    """Return the directory that a tier's location names; None for that of a bucket. ConfigError for any other."""
    parts = urlsplit(location)
    if parts.scheme in CLOUDS and parts.netloc:
        return None
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(parts.path)
    if "://" in location or not location.strip():
        raise ConfigError(f"tier: {location!r} is no directory and none of {', '.join(CLOUDS.values())}")
    return Path(location).expanduser().absolute()


@dataclass(frozen=True, slots=True)
class ModelsSettings:
    """Several models by name, each with a server process of its own; this process serves one if there is no `path`."""

    path: Path | None = setting(
        None,
        "serve several models by name: a TOML file with a table [models.NAME] for each, or a folder of models",
        detail="Needs the package `rekindle-models`. Each is loaded when it is asked for. "
        "See [models-host.md](models-host.md).",
        unset="one model",
        name="models",
    )
    keep_alive: str = setting(
        "5m",
        "how long a model of several stays loaded after its last request: 90s, 5m, 8h; 0: not at all; -1: for good",
        detail="A table of a model may have its own, and so may a request, as Ollama's do.",
    )
    max_loaded: int = setting(
        1,
        "models of several that are loaded at once",
        detail="Where another one is asked for, the one that was idle longest is left, and running answers are "
        "waited for.",
        bounds=at_least(1, 64),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            _ = self.keep_alive_s
        except ConfigError as error:
            raise ConfigError(f"keep_alive: {error}; 0: not at all, -1: for good") from error

    @property
    def keep_alive_s(self) -> float:
        """Seconds that a model stays loaded after its last request; infinity for good."""
        return math.inf if self.keep_alive.strip() == "-1" else parse_duration(self.keep_alive)
