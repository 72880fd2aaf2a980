"""What clients ask about models: which there are, which are loaded and until when, in three dialects.

What a model is can be said once it was loaded: its process is asked when it becomes ready, and that is kept. What it
takes in memory is asked each time.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from rekindle.server.gate.keys import Access
from rekindle.server.models import rfc3339, tagged
from rekindle.server.ollama.models import FOREVER
from rekindle_models.child import Keys
from rekindle_models.forwarding import Forwarder
from rekindle_models.named import Model, Models
from rekindle_models.places import Place, Places

VERSION_OF_ANTHROPIC = "2023-06-01"


@dataclass(frozen=True, slots=True)
class _Known:
    """The entries of a process for its model: OpenAI's, Anthropic's and Ollama's."""

    openai: dict[str, Any]
    anthropic: dict[str, Any]
    tag: dict[str, Any]


class Descriptions:
    """The entries of all models."""

    def __init__(
        self,
        models: Models,
        places: Places,
        forwarder: Forwarder,
        keys: Keys,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._models = models
        self._places = places
        self._forwarder = forwarder
        self._keys = keys
        self._key = keys.admin or next(iter(keys.of.values()))
        self._clock = clock
        self._created = clock()
        self._known: dict[str, _Known] = {}

    async def learn(self) -> None:
        """Ask the processes that answer, and were not asked yet."""
        for place in self._places.ready():
            if place.model.name not in self._known:
                try:
                    self._known[place.model.name] = await self._asked(place)
                except (httpx.HTTPError, LookupError):  # it ends at this moment: nothing is known
                    continue

    async def _asked(self, place: Place) -> _Known:
        url, ask = place.process.url, self._forwarder.json
        plain: Any = await ask(url, "/v1/models", self._key)
        other: Any = await ask(url, "/v1/models", self._key, **{"anthropic-version": VERSION_OF_ANTHROPIC})
        tags: Any = await ask(url, "/api/tags", self._key)
        return _Known(plain["data"][0], other["data"][0], tags["models"][0])

    async def openai(self, model: Model) -> dict[str, Any]:
        """Return the entry of /v1/models, with whether it is loaded."""
        await self.learn()
        known = self._known.get(model.name)
        entry = {"id": model.name, "object": "model", "created": int(self._created), "owned_by": "rekindle"}
        about = {} if known is None else known.openai["rekindle"]
        entry |= {} if known is None else known.openai
        return {**entry, "rekindle": {**about, **self._state(model)}}

    async def anthropic(self, model: Model) -> dict[str, Any]:
        """Return the entry of /v1/models in Anthropic's shape."""
        await self.learn()
        known = self._known.get(model.name)
        if known is not None:
            return known.anthropic
        created = rfc3339(self._created)
        return {"type": "model", "id": model.name, "display_name": model.name, "created_at": created}

    async def tag(self, model: Model) -> dict[str, Any]:
        """Return the entry of /api/tags; without details of one that was not loaded yet."""
        await self.learn()
        known = self._known.get(model.name)
        if known is not None:
            return known.tag
        name = tagged(model.name)
        digest = hashlib.sha256(name.encode()).hexdigest()  # of nothing that is loaded; Ollama's command shows one
        entry = {"name": name, "model": name, "digest": digest, "size": model.size, "details": {}}
        return {**entry, "modified_at": rfc3339(self._created)}

    async def running(self, access: Access) -> list[dict[str, Any]]:
        """Return the entries of /api/ps: what is loaded, what it takes now as far as this access sees, until when."""
        key = self._keys.key_for(access)
        assert key is not None, "asked without a key"
        found = await asyncio.gather(*(self._running(place, key) for place in self._places.ready()))
        return [entry for entry in found if entry is not None]

    async def _running(self, place: Place, key: str) -> dict[str, Any] | None:
        try:
            said: Any = await self._forwarder.json(place.process.url, "/api/ps", key)
            return {**said["models"][0], "expires_at": self._until(place)}
        except (httpx.HTTPError, LookupError):  # it ends at this moment
            return None

    def _state(self, model: Model) -> dict[str, Any]:
        place = self._places.peek(model)
        if place is None:
            return {"loaded": False, "expires_at": None}
        return {"loaded": True, "expires_at": self._until(place)}

    def _until(self, place: Place) -> str:
        left_s = self._places.expires_in(place)
        return FOREVER if left_s is None else rfc3339(self._clock() + left_s)
