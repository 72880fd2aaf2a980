"""What a full tier evicts: one eviction order for the library, the hot pool, the disk and the simulator.

`order` works on slot numbers, `keyed` on keys of any kind; `policies` decides what a use is worth.
"""

from rekindle.cache.eviction.hints import Hints
from rekindle.cache.eviction.keyed import KeyedOrder
from rekindle.cache.eviction.order import EvictionOrder
from rekindle.cache.eviction.policies import POLICIES, Policy, make_policy

__all__ = ["POLICIES", "EvictionOrder", "Hints", "KeyedOrder", "Policy", "make_policy"]
