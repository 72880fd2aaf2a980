"""The served model: its names and its description."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rekindle.errors import NotFound
from rekindle.server.border import Dialect

if TYPE_CHECKING:  # a server of several models computes nothing, and imports no torch
    from rekindle.engine.api import Engine

DEFAULT = "default"
LATEST = ":latest"  # the tag that Ollama's clients add to a name without one
MAX_NAME_CHARS = 100  # of a name, in error messages
MAX_COMPARED = 4096  # characters of a name, more than any name has


def rfc3339(at_s: float) -> str:
    """Return Unix seconds as a time in UTC."""
    return datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")


def tagged(name: str) -> str:
    """Return a name with a tag, as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def forms(name: str) -> set[str]:
    """Return what a name in a request may stand for, in lower case: itself, and itself without Ollama's tag."""
    folded = name[:MAX_COMPARED].casefold()
    return {folded, folded.removesuffix(LATEST)}


def is_any(name: str, dialect: Dialect) -> bool:
    """Whether a name stands for whatever is served.

    In Anthropic's dialect any name of Claude's does: its clients request several models by name, and not all of them
    can be configured.
    """
    return dialect == "anthropic" and name.startswith("claude-")


def unserved(name: str, served: Sequence[str], dialect: Dialect) -> NotFound:
    """Return the error for a name that is not served; in Ollama's dialect it begins in its words, which clients look
    for."""
    if dialect == "ollama":
        missing = json.dumps(name[:MAX_NAME_CHARS], ensure_ascii=False)
        others = ", ".join(map(tagged, served))
        message = f"model {missing} not found, try pulling it first (not from here: this server has {others})"
    else:
        names = ", ".join(map(repr, served))
        message = f"model {name[:MAX_NAME_CHARS]!r} is not served here; {names} {'is' if len(served) == 1 else 'are'}"
    return NotFound(message, param="model")


class ServedModel:
    """Answers to the served name, to what it was loaded from, and to `default`; `:latest` after a name changes nothing.

    `created`: when it was loaded, in Unix seconds.
    """

    def __init__(self, engine: Engine, *, alias: str | None, name: str | None, created: int) -> None:
        self._engine = engine
        self.created = created
        self.name = name or engine.spec.name
        names = {self.name, engine.spec.name, DEFAULT} | ({alias} if alias else set())
        self._names = {each.casefold() for each in names}

    def require(self, name: str | None, *, dialect: Dialect = "openai") -> None:
        """Raise NotFound unless `name` is a name of the served model, in upper or lower case, or None."""
        if name is None or forms(name) & self._names or is_any(name, dialect):
            return
        raise unserved(name, [self.name], dialect)

    @property
    def tagged(self) -> str:
        """The served name with a tag, as Ollama lists it."""
        return tagged(self.name)

    def described_for_anthropic(self) -> dict[str, Any]:
        """Return the entry of /v1/models in Anthropic's shape."""
        return {
            "type": "model",
            "id": self.name,
            "display_name": self.name,
            "lifecycle": "active",
            "created_at": rfc3339(self.created),
            "max_input_tokens": self._engine.max_context,
            "max_tokens": self._engine.max_context,
        }

    def described(self) -> dict[str, Any]:
        """Return the entry of /v1/models; KV sizes are bytes per token, averaged over whole blocks. `sampling` is what
        chats of our own are sampled with.

        A front says what kind of server computes, and has sizes of KV if it keeps any; its formats are that server's.
        """
        spec, backend = self._engine.spec, self._engine.settings.backend
        layout = spec.layout
        kv: dict[str, Any] = {"kv_bytes_per_token": layout.token_bytes, "block_tokens": layout.block_tokens}
        if backend.address is None:
            kv |= {"kv_formats": layout.formats(), "kv_bytes_per_token_16bit": layout.token_bytes_16bit}
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "rekindle",
            "max_model_len": self._engine.max_context,
            "rekindle": {
                "architecture": spec.architecture,
                **({} if backend.address is None else {"backend": backend.kind}),
                **(kv if self._engine.has_kv else {}),
                "promise": self._engine.promise,
                "sampling": self._engine.sampling.named("llama-server"),
            },
        }
