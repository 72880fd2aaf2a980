"""Rekindle: an inference server and library that keep every agent's KV cache alive.

Nothing is imported until it is used, so `import rekindle.cache` needs neither torch nor transformers. With the first
use of an engine torch is imported so that its threads do not spin for long while they wait for each other; a program
that has imported it before sets GOMP_SPINCOUNT=3000 itself, if its machine has busy neighbours.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rekindle.config import Settings as Settings
    from rekindle.engine.agent import Agent as Agent
    from rekindle.engine.api import Engine as Engine
    from rekindle.engine.generation import Generation as Generation
    from rekindle.engine.types import ChatResult as ChatResult
    from rekindle.engine.types import Delta as Delta
    from rekindle.engine.types import Report as Report
    from rekindle.errors import BackendFailed as BackendFailed
    from rekindle.errors import BadRequest as BadRequest
    from rekindle.errors import Cancelled as Cancelled
    from rekindle.errors import ConfigError as ConfigError
    from rekindle.errors import Conflict as Conflict
    from rekindle.errors import HubUnreachable as HubUnreachable
    from rekindle.errors import ModelRefused as ModelRefused
    from rekindle.errors import NotFound as NotFound
    from rekindle.errors import Overloaded as Overloaded
    from rekindle.errors import PortTaken as PortTaken
    from rekindle.errors import PromptTooLong as PromptTooLong
    from rekindle.errors import PurgeUnproved as PurgeUnproved
    from rekindle.errors import QuotaExceeded as QuotaExceeded
    from rekindle.errors import RekindleError as RekindleError
    from rekindle.errors import RequestFailed as RequestFailed
    from rekindle.errors import StoreError as StoreError
    from rekindle.errors import StoreLocked as StoreLocked
    from rekindle.errors import StoreRefused as StoreRefused
    from rekindle.errors import Timeout as Timeout
    from rekindle.errors import Unavailable as Unavailable
    from rekindle.model.params import SamplingParams as SamplingParams
    from rekindle.text.constraints.types import Constraint as Constraint

__version__ = "0.1.0"
_ERRORS = """BackendFailed BadRequest Cancelled ConfigError Conflict HubUnreachable ModelRefused NotFound
    Overloaded PortTaken PromptTooLong PurgeUnproved QuotaExceeded RekindleError RequestFailed StoreError StoreLocked
    StoreRefused Timeout Unavailable"""
LAZY = {
    "Agent": "rekindle.engine.agent",
    "ChatResult": "rekindle.engine.types",
    "Constraint": "rekindle.text.constraints.types",
    "Delta": "rekindle.engine.types",
    "Engine": "rekindle.engine.api",
    "Generation": "rekindle.engine.generation",
    "Report": "rekindle.engine.types",
    "SamplingParams": "rekindle.model.params",
    "Settings": "rekindle.config",
    **dict.fromkeys(_ERRORS.split(), "rekindle.errors"),
}
COMPUTING = ("Agent", "Engine")  # which import torch
__all__ = ["__version__"]
__all__ += list(LAZY)


def __getattr__(name: str) -> Any:
    if name in LAZY:
        if name in COMPUTING and "torch" not in sys.modules:
            from rekindle.compute.cpu.kernels.thread_pool import spinning_bounded

            with spinning_bounded():
                import_module("torch")
        value = globals()[name] = getattr(import_module(LAZY[name]), name)
        return value
    raise AttributeError(f"module 'rekindle' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__])
