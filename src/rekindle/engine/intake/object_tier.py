"""The object tier as an engine sees it: what is saved here goes there, and what other replicas have saved comes back.

Another distribution has it. Nothing of it raises into a request, except that an agent is not said to be forgotten
before the tier has noted it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.config import TierSettings
from rekindle.engine.intake.prompt_lookup import Prompt
from rekindle.engine.memory.adoption import Adoption
from rekindle.engine.memory.memory import OnMemory
from rekindle.engine.types import GenerationRequest
from rekindle.errors import ConfigError
from rekindle.extensions import extensions, load
from rekindle.spec import KVLayout
from rekindle.store.warm import WarmStore


@dataclass(frozen=True, slots=True)
class Replica:
    """What a tier is opened for: one engine and its store.

    `prefill_s` says how long computing so many tokens from a position on would take; `agents` which (namespace, agent)
    are known here; `forget` purges one here unless it was used since a time (wall clock), and says whether it did.
    """

    settings: TierSettings
    store: WarmStore
    adoption: Adoption
    fingerprint: bytes
    layout: KVLayout
    max_branches: int
    prefill_s: Callable[[int, int], float]
    agents: Callable[[], Iterable[tuple[str, str]]]
    forget: Callable[[str, str, float], bool]


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Objects of a forgotten agent that were deleted, and those that stay because other agents share them."""

    objects_deleted: int
    objects_shared: int


class ObjectTier(Protocol):
    """An open tier. `start` it after the store, `stop` it before."""

    def start(self) -> None:
        """Start the threads."""

    def stop(self, timeout_s: float) -> bool:
        """Export what waits, for at most `timeout_s` seconds; return whether all of it was exported."""

    def export(self, namespace: str, agent: str, branch: int) -> None:
        """Export a branch as the store has it by then. Any thread; never blocks."""

    def forget(self, namespace: str, agent: str, *, is_here: bool) -> Forgotten | None:
        """Forget an agent on all replicas; None if the tier had nothing of it. StoreError if it does not answer."""

    def problem(self) -> str | None:
        """Return what does not work, in a sentence; None if all is well."""

    def stats(self) -> Mapping[str, Any]:
        """Return its figures since it was opened."""


class TierImports(Protocol):
    """What comes from a tier, each only as long as that beats computing. Called by workers."""

    def agent(self, request: GenerationRequest, prompt: Prompt, on_memory: OnMemory) -> tuple[bool, float]:
        """Take in what others have computed for the request's agent; return whether its prompt may match more now, and
        how many seconds it has waited for the object store."""

    def named(self, namespace: str, agent: str, on_memory: OnMemory) -> None:
        """Take in the texts of an agent that a caller asks for by its name, if the tier has any."""

    def blocks(self, request: GenerationRequest, prompt: Prompt, root: BlockHash, *, waited_s: float) -> int:
        """Store the blocks of a prompt that are missing here and in the tier; return how many. `waited_s`: how long
        the request has waited for the object store before."""


Opener = Callable[[Replica], tuple[ObjectTier, TierImports]]


def tier_opener() -> Opener:
    """Return what opens a tier; ConfigError if nothing is installed that does."""
    found = extensions("rekindle.tier")
    if not found:
        raise ConfigError("tier needs packages that are not installed: pip install 'rekindle[tier]'")
    opener: Opener = load(found[0])
    return opener
