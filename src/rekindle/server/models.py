"""The served model: its names and its description."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from rekindle.engine.api import Engine
from rekindle.errors import NotFound
from rekindle.server.border import Dialect

DEFAULT = "default"
LATEST = ":latest"  # the tag that Ollama's clients add to a name without one
MAX_NAME_CHARS = 100  # of a name, in error messages


def rfc3339(at_s: float) -> str:
    """Return Unix seconds as a time in UTC."""
    return datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")


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
        """Raise NotFound unless `name` is a name of the served model, in upper or lower case, or None.

        In Anthropic's dialect any name of Claude's is accepted: its clients request several models by name, and not
        all of them can be configured. In Ollama's the error begins in its words, which clients look for.
        """
        if name is None or {name.casefold(), name.casefold().removesuffix(LATEST)} & self._names:
            return
        if dialect == "anthropic" and name.startswith("claude-"):
            return
        message = f"model {name!r} is not served here; {self.name!r} is"
        if dialect == "ollama":
            missing = json.dumps(name[:MAX_NAME_CHARS], ensure_ascii=False)
            message = f"model {missing} not found, try pulling it first (not from here: this server has {self.tagged})"
        raise NotFound(message, param="model")

    @property
    def tagged(self) -> str:
        """The served name with a tag, as Ollama lists it."""
        return self.name if ":" in self.name.rpartition("/")[2] else self.name + LATEST

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

        A front, where KV is another server's, says what kind of server that is.
        """
        spec, backend = self._engine.spec, self._engine.settings.backend
        layout = spec.layout
        kv = {
            "kv_formats": layout.formats(),
            "kv_bytes_per_token": layout.token_bytes,
            "kv_bytes_per_token_16bit": layout.token_bytes_16bit,
            "block_tokens": layout.block_tokens,
        }
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "rekindle",
            "max_model_len": self._engine.max_context,
            "rekindle": {
                "architecture": spec.architecture,
                **(kv if backend.address is None else {"backend": backend.kind}),
                "promise": self._engine.promise,
                "sampling": self._engine.sampling.named("llama-server"),
            },
        }
