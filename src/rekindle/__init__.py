"""Rekindle: an inference server and library that keep every agent's KV cache alive.

Nothing is imported until it is used, so `import rekindle.cache` needs neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rekindle.engine.api import Engine as Engine

__version__ = "0.1.0"
_LAZY = {"Engine": "rekindle.engine.api"}
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'rekindle' has no attribute {name!r}")
