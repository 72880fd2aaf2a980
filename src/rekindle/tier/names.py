"""Names of objects below a model's prefix. They do not show which agent or text they belong to.

blocks/HASH.PART    a record of the store, as it is
heads/DIGEST        an agent's head
purged/DIGEST       that an agent was purged; its head says when
"""

from __future__ import annotations

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.tier.sealing import Sealer

BLOCKS, HEADS, PURGED = "blocks", "heads", "purged"


def block_name(block_hash: BlockHash, part: int) -> str:
    """Return the name of a part of a block."""
    return f"{BLOCKS}/{block_hash.hex()}.{part}"


def head_name(sealer: Sealer, namespace: str, agent: str) -> str:
    """Return the name of an agent's head."""
    return f"{HEADS}/{sealer.digest(namespace, agent)}"


def purged_name(sealer: Sealer, namespace: str, agent: str) -> str:
    """Return the name of the note that an agent was purged."""
    return f"{PURGED}/{sealer.digest(namespace, agent)}"
