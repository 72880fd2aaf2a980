"""What a full tier evicts: one eviction order for the library, the hot pool, the disk and the simulator.

`order` works on slot numbers, `keyed` on keys of any kind.
"""

from rekindle.cache.eviction.keyed import KeyedOrder
from rekindle.cache.eviction.order import EvictionOrder

__all__ = ["EvictionOrder", "KeyedOrder"]
