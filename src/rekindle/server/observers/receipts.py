"""Receipts: what each reply read of stored blocks, what was computed for it, and by which model, under its answer's id.

Owns what a receipt says, and makes one at the end of every choice of an answer; who keeps them is given. It has hashes
and numbers, no text. The hashes are those that the engine found and made while it computed: none is computed here.

    read       the first tokens of the prompt, from blocks that were stored: their number, and the last block's hash
    computed   all tokens after them, in prompt and reply
    head       the last block that holds prompt and reply; a chained hash stands for all blocks before it, too

Of both also the block before it is named: a tail is replaced by a longer block once its conversation goes on.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rekindle.engine.types import Delta, FinishReason, Report
from rekindle.server.gate.caller import Caller
from rekindle.server.lines import CURRENT
from rekindle.server.observers.observer import ReplyId
from rekindle.text.messages import Message

if TYPE_CHECKING:  # a server of several models computes nothing, and imports no torch
    from rekindle.engine.api import Engine


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is kept of one choice of an answer, in the namespace of its caller. `content` is JSON."""

    namespace: str
    id: str
    choice: int
    agent: str | None
    content: dict[str, Any]


def identity_of(engine: Engine, model: str) -> dict[str, Any]:
    """Return what replies are computed by: the model's name and fingerprint, the form of its KV, its templates; which
    other server, if one computes. Blocks of one that keeps its KV to itself hold token ids alone.

    The template is no part of the fingerprint: tokens are found by what they are, whatever made them.
    """
    spec, sources = engine.spec, engine.encoder.template.sources
    return {
        "model": model,
        "fingerprint": spec.fingerprint.hex(),
        "backend": engine.settings.backend.kind if engine.settings.backend.address is not None else None,
        "holds": "kv" if engine.has_kv else "ids",
        "kv": spec.layout.formats() if engine.has_kv else {},
        "block_tokens": spec.layout.block_tokens,
        "templates": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(sources.items())},
    }


class Receipts:
    """An observer that gives `keep` a receipt of each choice, with the `ticket` of when its request came.

    `keep` returns at once. `identity` is that of `identity_of`.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        *,
        ticket: Callable[[], int],
        keep: Callable[[Receipt, int], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.identity = identity
        self.ticket = ticket
        self.keep = keep
        self.clock = clock

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> ReceiptWatch:
        """Follow one request."""
        line = CURRENT.get()
        return ReceiptWatch(self, caller, endpoint, None if line is None else line.request_id)


class ReceiptWatch:
    """Makes the receipts of one request."""

    def __init__(self, receipts: Receipts, caller: Caller, endpoint: str, request_id: str | None) -> None:
        self._receipts = receipts
        self._caller = caller
        self._endpoint = endpoint
        self._request_id = request_id
        self._ticket = receipts.ticket()

    def delta(self, choice: int, delta: Delta) -> None:
        """Ignore deltas: the last report has everything."""

    def finished(
        self, number: int, report: Report, reason: FinishReason, *, reply: Message, id: ReplyId | None = None
    ) -> None:
        """Give out the receipt of a choice; of an answer without an id it is under the request's."""
        answer = None if id is None else id.receipt(self._request_id)
        if id is None or answer is None:
            return
        caller, receipts = self._caller, self._receipts
        content = {
            "created": receipts.clock(),
            "endpoint": self._endpoint,
            "identity": receipts.identity,
            "choice": {"index": id.choice, "finish_reason": reason, **_facts(report)},
        }
        receipts.keep(Receipt(caller.namespace, answer, id.choice, caller.agent, content), self._ticket)

    def failed(self, number: int | None, error: Exception) -> None:
        """Nothing: there is no reply."""


def _facts(report: Report) -> dict[str, Any]:
    """Return what was read and what was computed for a reply."""
    chain = report.chain
    assert chain is not None, "the report of a whole reply has its chain"
    return {
        "reuse": report.reuse,
        "outcome": report.outcome,
        "source": report.source,
        "prompt_tokens": report.prompt_tokens,
        "root": chain.root.hex(),
        "read": {
            "tokens": report.reused_tokens,
            "hot_tokens": report.hot_tokens,
            "warm_tokens": report.warm_tokens,
            "hash": None if chain.read is None else chain.read.hash.hex(),
            "parent": None if chain.read is None else chain.read.parent.hex(),
        },
        "computed": {
            "first": report.reused_tokens,
            "prompt": report.computed_tokens,
            "reply": report.completion_tokens,
        },
        "head": {
            "tokens": chain.head.num_tokens,
            "hash": chain.head.hash.hex(),
            "parent": chain.head.parent.hex(),
        },
    }
