"""Routes of receipts: what is kept of an answer by its id, next to what of it is still on disk and serves now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.api import Engine
from rekindle.errors import NotFound
from rekindle.server.border import Router
from rekindle.server.gate.caller import Namespace
from rekindle.server.observers.receipts import Receipt
from rekindle.server.responses.stored import StoredResponses

PATH = "/v1/receipts"


class ChoiceReceipt(BaseModel):
    """One choice: what it read and what was computed for it."""

    model_config = ConfigDict(extra="allow")
    index: int
    finish_reason: str
    prompt_tokens: int
    root: str = Field(description="hash before the first block: of the namespace under this model")
    read: dict[str, Any] = Field(description="tokens that were reused, and the hash of the last block they are in")
    computed: dict[str, int] = Field(description="the first computed token, and how many in prompt and reply")
    head: dict[str, Any] = Field(description="the last block that holds prompt and reply, up to so many tokens")
    blocks: list[dict[str, Any]] = Field(description="the blocks that were read, in order, as far as they are known")
    is_whole: bool = Field(description="whether these are all; others have left the disk, or were never written")


class ReceiptAnswer(BaseModel):
    """What an answer read of stored blocks, what was computed for it, and by which model."""

    model_config = ConfigDict(extra="allow")
    id: str
    object: str = "receipt"
    created: float = Field(description="Unix seconds of the end of the answer")
    agent: str | None
    identity: dict[str, Any] = Field(description="model, fingerprint, form of the KV, SHA-256 of each template")
    changed: list[str] = Field(description="parts of the identity that are others now")
    choices: list[ChoiceReceipt]


def receipts_router(engine: Engine, identity: Mapping[str, Any], responses: StoredResponses) -> APIRouter:
    """Routes of receipts, each within the namespace of its key. `identity`: of what serves now."""
    router = Router(prefix=PATH, tags=["receipts"])

    @router.get("/{id}", response_model=ReceiptAnswer)
    def show_receipt(id: str, namespace: Namespace) -> dict[str, Any]:
        """What an answer read and what was computed for it; of Ollama's answers by their `X-Request-ID`."""
        found = responses.receipts(namespace, id)
        if not found:
            raise NotFound(
                f"no receipt of {id[:100]!r} is kept here: it is another namespace's, its agent was deleted, or newer "
                "ones took its place",
                param="id",
            )
        first = found[0].content
        return {
            "id": id,
            "object": "receipt",
            "created": first["created"],
            "endpoint": first["endpoint"],
            "namespace": namespace,
            "agent": found[0].agent,
            "identity": first["identity"],
            "changed": [name for name, value in first["identity"].items() if identity.get(name) != value],
            "choices": [_shown(engine, each) for each in found],
        }

    return router


def _shown(engine: Engine, receipt: Receipt) -> dict[str, Any]:
    """A choice with the blocks that it read, as far as they are on disk."""
    choice, size = receipt.content["choice"], receipt.content["identity"]["block_tokens"]
    read = choice["read"]
    if read["hash"] is None:
        return {**choice, "blocks": [], "is_whole": not read["tokens"]}
    num_before = (read["tokens"] - 1) // size
    before = engine.stored_chain(BlockHash(bytes.fromhex(read["parent"])), num_before)
    blocks = [{"hash": block.hash.hex(), "tokens": size} for block in before]
    last = {"hash": read["hash"], "tokens": read["tokens"] - num_before * size}
    return {**choice, "blocks": [*blocks, last], "is_whole": len(before) == num_before}
