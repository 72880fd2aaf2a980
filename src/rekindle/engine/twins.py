"""Requests of one prompt: the others wait while one computes it, then take its blocks, the tail included.

Derived anew every step from who runs and who loads, so there is no leader that could fail: whoever of them starts first
computes, and when it is gone before it is done, the next one does.
"""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.request import Request, State

_Key = tuple[int, BlockHash, str]


def _key(request: Request) -> _Key:
    """What requests share that were prepared together: the very same array of ids."""
    return id(request.prompt_ids), request.root, request.reuse


def has_prompt(request: Request) -> bool:
    """Whether the KV of a request's whole prompt is in its blocks."""
    return request.state is State.RUNNING and request.table.num_tokens >= request.num_prompt


class Twins:
    """Who runs or loads, by prompt; of several with the same, one that has computed it."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._by_prompt: dict[_Key, Request] = {}
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """Note who has just started, if it did."""
        known = self._by_prompt.get(_key(request))
        if request.state in (State.RUNNING, State.LOADING) and (known is None or not has_prompt(known)):
            self._by_prompt[_key(request)] = request

    def of(self, request: Request) -> Request | None:
        """One that was prepared with this request, which has said nothing yet (else it has blocks of its own)."""
        twin = self._by_prompt.get(_key(request))
        return None if request.num_generated else twin
