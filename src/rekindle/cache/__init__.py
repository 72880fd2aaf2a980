"""Prefix caching: a cache of arbitrary payloads, and the hot tier's bookkeeping of KV blocks.

Usable on its own: needs only numpy and imports in milliseconds; knows neither text nor tensors nor files. Usage is in
docs/cache.md.
"""

from rekindle.cache.blocks.contents import BlockCopy
from rekindle.cache.blocks.hashing import (
    HASH_BYTES,
    BlockHash,
    BlockIdentity,
    TokenIds,
    block_hash,
    chain_hashes,
    id_bytes,
    root_hash,
    tail_hash,
)
from rekindle.cache.blocks.pool import BlockPool
from rekindle.cache.blocks.table import BlockTable, Published
from rekindle.cache.blocks.windows import WindowSlots, resume_position
from rekindle.cache.eviction import EvictionOrder, KeyedOrder
from rekindle.cache.library.batch import BatchAnalysis, SharedPrefix, analyze_batch
from rekindle.cache.library.entries import CacheConfig, CacheEntry, CacheStats, PrefixMatch, content_key
from rekindle.cache.library.manager import CacheManager
from rekindle.cache.trie.keys import Key, Keys
from rekindle.cache.trie.radix import RadixTrie
from rekindle.parts import StatePart, WindowPart

__all__ = [
    "HASH_BYTES",
    "BatchAnalysis",
    "BlockCopy",
    "BlockHash",
    "BlockIdentity",
    "BlockPool",
    "BlockTable",
    "CacheConfig",
    "CacheEntry",
    "CacheManager",
    "CacheStats",
    "EvictionOrder",
    "Key",
    "KeyedOrder",
    "Keys",
    "PrefixMatch",
    "Published",
    "RadixTrie",
    "SharedPrefix",
    "StatePart",
    "TokenIds",
    "WindowPart",
    "WindowSlots",
    "analyze_batch",
    "block_hash",
    "chain_hashes",
    "content_key",
    "id_bytes",
    "resume_position",
    "root_hash",
    "tail_hash",
]
