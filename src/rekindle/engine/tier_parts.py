"""Builds what an engine with an object tier has: the tier, and what imports from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rekindle.config import Settings
from rekindle.engine.agent_admin import purge_forgotten
from rekindle.engine.components import Components
from rekindle.engine.core.costs import StepCosts
from rekindle.engine.memory.adoption import Adoption
from rekindle.errors import ConfigError
from rekindle.spec import ModelSpec
from rekindle.store.warm import WarmStore
from rekindle.tier.location import directory_of

if TYPE_CHECKING:
    from rekindle.engine.intake.tier_imports import TierImports
    from rekindle.tier.tier import ObjectTier


def check_tier(settings: Settings, *, use_store: bool) -> None:
    """Raise ConfigError for a location that cannot be one, or a tier without a store."""
    if settings.tier.location is None:
        return
    directory_of(settings.tier.location)
    if not use_store:
        raise ConfigError("tier needs a store and reuse: what comes from other replicas is kept there first")


def open_tier(settings: Settings, store: WarmStore | None, spec: ModelSpec) -> ObjectTier | None:
    """Open the object tier, if there is to be one; none without a store that works."""
    if settings.tier.location is None or store is None:
        return None
    from rekindle.tier.tier import ObjectTier

    return ObjectTier.open(
        settings.tier,
        store,
        fingerprint=spec.fingerprint,
        layout=spec.layout,
        max_branches=settings.cache.max_branches,
    )


def tier_imports(
    tier: ObjectTier | None,
    store: WarmStore | None,
    adoption: Adoption | None,
    spec: ModelSpec,
    costs: StepCosts,
    components: Callable[[], Components],
) -> TierImports | None:
    """Return what imports for an engine; None without a tier. `components` are asked for once the engine runs."""
    if tier is None or store is None or adoption is None:
        return None
    from rekindle.engine.intake.tier_imports import TierImports

    def forget(namespace: str, agent: str, purged_at: float) -> bool:
        return purge_forgotten(components(), namespace, agent, purged_at)

    tier.connect(lambda: components().intake.call(components().memory.book.everybody).result(), forget)
    return TierImports(tier.imports, adoption, store, spec.layout, costs.prefill, forget)
