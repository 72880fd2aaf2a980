"""Routes of receipts: what is kept of an answer by its id, next to what of it is still on disk and serves now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class CheckedBlocks(BaseModel):
    """What checks in idle time found of the blocks that were read, since the server started."""

    equal: int = Field(description="blocks that were computed again and have the same bits")
    differed: int = Field(description="blocks that had other bits, or came after such a one, and were dropped")


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
    checked: CheckedBlocks | None = Field(description="null: restored blocks are not checked here")


class ReceiptAnswer(BaseModel):
    """What an answer read of stored blocks, what was computed for it, and by which model."""

    model_config = ConfigDict(extra="allow")
    id: str
    object: str = "receipt"
    created: float = Field(description="Unix seconds of the end of the answer")
    agent: str | None
    identity: dict[str, Any] = Field(
        description="model, fingerprint, backend, what blocks hold (kv, or ids alone), form of the KV, SHA-256 of each "
        "template"
    )
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
        return {**choice, "blocks": [], "is_whole": not read["tokens"], "checked": _checked(engine, [])}
    num_before = (read["tokens"] - 1) // size
    parent, last = (BlockHash(bytes.fromhex(read[name])) for name in ("parent", "hash"))
    before = [each.hash for each in engine.stored_chain(parent, num_before)]
    blocks = [{"hash": each.hex(), "tokens": size} for each in before]
    blocks.append({"hash": last.hex(), "tokens": read["tokens"] - num_before * size})
    checked = _checked(engine, [*before, parent, last])
    return {**choice, "blocks": blocks, "is_whole": len(before) == num_before, "checked": checked}


def _checked(engine: Engine, hashes: Sequence[BlockHash]) -> dict[str, int] | None:
    found = engine.verdict(hashes)
    return None if found is None else {"equal": found.num_equal, "differed": found.num_differed}
