"""The warm tier: blocks and sequences on disk, found again after a restart. Knows no requests and no device tensors."""
