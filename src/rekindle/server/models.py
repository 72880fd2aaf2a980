"""The served model: its names and its description."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from rekindle.engine.api import Engine
from rekindle.errors import NotFound

DEFAULT = "default"
Dialect = Literal["openai", "anthropic"]


class ServedModel:
    """Answers to the served name, to what it was loaded from, and to `default`."""

    def __init__(self, engine: Engine, *, alias: str | None, name: str | None, created: int) -> None:
        self._engine = engine
        self._created = created
        self.name = name or engine.spec.name
        self._names = {self.name, engine.spec.name, DEFAULT} | ({alias} if alias else set())

    def require(self, name: str | None, *, dialect: Dialect = "openai") -> None:
        """Raise NotFound unless `name` is a name of the served model or None.

        In Anthropic's dialect any name of Claude's is accepted: its clients request several models by name, and not
        all of them can be configured.
        """
        if dialect == "anthropic" and name is not None and name.startswith("claude-"):
            return
        if name is not None and name not in self._names:
            raise NotFound(f"model {name!r} is not served here; {self.name!r} is", param="model")

    def described_for_anthropic(self) -> dict[str, Any]:
        """Return the entry of /v1/models in Anthropic's shape."""
        return {
            "type": "model",
            "id": self.name,
            "display_name": self.name,
            "lifecycle": "active",
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z"),
            "max_input_tokens": self._engine.max_context,
            "max_tokens": self._engine.max_context,
        }

    def described(self) -> dict[str, Any]:
        """Return the entry of /v1/models; KV sizes are bytes per token, averaged over whole blocks."""
        spec = self._engine.spec
        layout = spec.layout
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "rekindle",
            "max_model_len": self._engine.max_context,
            "rekindle": {
                "architecture": spec.architecture,
                "kv_formats": layout.formats(),
                "kv_bytes_per_token": layout.token_bytes,
                "kv_bytes_per_token_16bit": layout.token_bytes_16bit,
                "block_tokens": layout.block_tokens,
                "promise": self._engine.promise,
            },
        }
