"""The bytes and tensors of blocks: the arena, the 4-bit format and attention over both.

Knows nothing of who may use, share or evict a block.
"""
