"""Attention of a model's own that does something that is not passed on to ours: what the trial at load must refuse.

Each changes what the model's own `eager_attention_forward` is given, with which the trial compares; None if there is
nothing of the kind in this call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rekindle.model.loaded import LoadedModel

Given = dict[str, Any]


def _mask(given: Given) -> Given | None:
    """Rows see what comes after them."""
    return {**given, "attention_mask": torch.zeros_like(given["attention_mask"])}


def _scale(given: Given) -> Given | None:
    return {**given, "scaling": given["scaling"] * 1.5}


def _position(given: Given) -> Given | None:
    """Queries are one position late."""
    return {**given, "query": given["query"].roll(1, dims=2)}


def _window(given: Given) -> Given | None:
    """A window is an eighth shorter, or one token; None where no row reaches to its end."""
    window, at = given.get("sliding_window"), torch.arange(given["key"].shape[2])
    if not window or len(at) < window:
        return None
    outside = at[-given["query"].shape[2] :, None] - at >= window - max(1, window // 8)
    mask = given["attention_mask"]
    return {**given, "attention_mask": mask.masked_fill(outside, torch.finfo(mask.dtype).min)}


def _softcap(given: Given) -> Given | None:
    return {**given, "softcap": given["softcap"] * 0.5} if given.get("softcap") else None


def _sink(given: Given) -> Given | None:
    """Sinks take twice as much."""
    if given.get("s_aux") is None:
        return None
    return {**given, "module": _WithSinks(given["module"], given["s_aux"] + 0.7)}


def _rotation(given: Given) -> Given | None:
    """Queries and keys are turned further by a hundredth of their position."""
    query, key = given["query"], given["key"]
    at = torch.arange(key.shape[2])[:, None]
    return {**given, "query": _turned(query, at[-query.shape[2] :]), "key": _turned(key, at)}


MUTANTS: dict[str, Callable[[Given], Given | None]] = {
    "mask": _mask,
    "scale": _scale,
    "position": _position,
    "window": _window,
    "softcap": _softcap,
    "sink": _sink,
    "rotation": _rotation,
}


class _WithSinks:
    """A module with other sinks."""

    def __init__(self, module: Any, sinks: torch.Tensor) -> None:
        self._module, self.sinks = module, sinks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _turned(states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """States [1, heads, rows, size] with their halves turned by an angle that grows with their positions [rows, 1]."""
    size, angle = states.shape[-1] // 2, at * 0.01
    cos, sin = angle.cos().to(states.dtype), angle.sin().to(states.dtype)
    first, second, rest = states[..., :size], states[..., size : 2 * size], states[..., 2 * size :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@contextmanager
def changed_attention(loaded: LoadedModel, kind: str) -> Iterator[list[int]]:
    """Change the own attention of a model's modules; yield a list with one entry for each call that was changed."""
    names = {type(module).__module__ for module in loaded.model.modules()}
    codes = [code for code in map(vars, map(sys.modules.get, names)) if "eager_attention_forward" in code]
    own = [code["eager_attention_forward"] for code in codes]
    calls: list[int] = []

    def changed_by(call: Callable[..., Any]) -> Callable[..., Any]:
        def changed(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **others: Any) -> Any:
            given = dict(module=module, query=query, key=key, value=value, attention_mask=attention_mask, **others)
            found = MUTANTS[kind](given)
            if found is None:
                return call(**given)
            calls.append(len(calls))
            return call(**found)

        return changed

    for code, each in zip(codes, own, strict=True):
        code["eager_attention_forward"] = changed_by(each)
    try:
        yield calls
    finally:
        for code, each in zip(codes, own, strict=True):
            code["eager_attention_forward"] = each
