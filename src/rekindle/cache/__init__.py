"""Prefixes and what is kept for them: a cache of any payload, and the hot tier's bookkeeping of KV blocks.

Usable alone: needs numpy only and imports in milliseconds; knows neither tensors nor files. The matcher, which needs a
tokenizer's tables, is imported by its own name. docs/cache.md shows how to use it.
"""

from rekindle.cache.batch import BatchAnalysis, SharedPrefix, analyze_batch
from rekindle.cache.copying import BlockCopy
from rekindle.cache.entries import CacheConfig, CacheEntry, CacheStats, PrefixMatch, content_key
from rekindle.cache.eviction import POLICIES, EvictionOrder, Hints, KeyedOrder, Policy, make_policy
from rekindle.cache.hashing import (
    HASH_BYTES,
    BlockHash,
    TokenIds,
    block_hash,
    chain_hashes,
    id_bytes,
    root_hash,
    tail_name,
)
from rekindle.cache.keys import Key, Keys
from rekindle.cache.manager import CacheManager
from rekindle.cache.pool import BlockPool
from rekindle.cache.radix import RadixTrie
from rekindle.cache.table import BlockTable, Published

__all__ = [
    "HASH_BYTES",
    "POLICIES",
    "BatchAnalysis",
    "BlockCopy",
    "BlockHash",
    "BlockPool",
    "BlockTable",
    "CacheConfig",
    "CacheEntry",
    "CacheManager",
    "CacheStats",
    "EvictionOrder",
    "Hints",
    "Key",
    "KeyedOrder",
    "Keys",
    "Policy",
    "PrefixMatch",
    "Published",
    "RadixTrie",
    "SharedPrefix",
    "TokenIds",
    "analyze_batch",
    "block_hash",
    "chain_hashes",
    "content_key",
    "id_bytes",
    "make_policy",
    "root_hash",
    "tail_name",
]
