"""The settings of a front: the server that computes in our place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from rekindle.config.setting import check_fields, need, setting

BackendKind = Literal["vllm", "openai"]
KINDS: tuple[BackendKind, ...] = get_args(BackendKind)


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """The server that computes; there is none without an address, and then this process computes."""

    address: str | None = setting(
        None,
        "the server that computes: vllm=URL; vllm alone starts one; openai=URL is another that takes token ids",
        detail="Needs the package `rekindle-vllm`. This server then loads no weights and keeps texts and agents. See "
        "[vllm.md](vllm.md#the-front).",
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
        "more flags of `vllm serve`, for a vLLM that is started here",
        detail="In one text, as on its command line.",
        unset="none",
        name="backend_flags",
    )
    silence_s: float = 600.0  # a request is given up when the backend sends nothing for this long

    def __post_init__(self) -> None:
        check_fields(self)
        need(
            self.flags is None or self.is_own, "backend_flags: these are for backend=vllm, a vLLM that is started here"
        )
        if self.address is None or self.is_own:
            return
        kind, _, url = self.address.partition("=")
        need(
            kind in KINDS and bool(url),
            f"backend: {self.address!r} is no backend: write vllm=http://HOST:PORT, vllm to start one here, or "
            "openai=http://HOST:PORT for another server that takes prompts as token ids",
        )
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
        need(is_url, f"backend: {url!r} is no URL: write it as http://HOST:PORT")
        need(parts.username is None, "backend: the URL may hold no key: set backend_key (REKINDLE_BACKEND_KEY)")

    @property
    def is_own(self) -> bool:
        """Whether a vLLM is to be started here."""
        return self.address == "vllm"

    @property
    def kind(self) -> BackendKind:
        """What kind of server it is; only with an address."""
        assert self.address is not None, "there is no backend"
        return "openai" if self.address.startswith("openai=") else "vllm"

    @property
    def url(self) -> str:
        """Its base URL, without `/v1`; only with an address that has one."""
        assert self.address is not None and not self.is_own, "there is no URL"
        return self.address.partition("=")[2].rstrip("/").removesuffix("/v1")
