"""Names, counts and prefixes of KV blocks: the hot tier's bookkeeping, usable alone.

Needs numpy only and imports in milliseconds; knows neither tensors nor files. The matcher, which needs a tokenizer's
tables, is imported by its own name.
"""

from rekindle.cache.eviction import LeafLRU
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
from rekindle.cache.pool import BlockPool
from rekindle.cache.radix import RadixTree
from rekindle.cache.table import BlockCopy, BlockTable, Published

__all__ = [
    "HASH_BYTES",
    "BlockCopy",
    "BlockHash",
    "BlockPool",
    "BlockTable",
    "LeafLRU",
    "Published",
    "RadixTree",
    "TokenIds",
    "block_hash",
    "chain_hashes",
    "id_bytes",
    "root_hash",
    "tail_name",
]
