"""Blocks of token ids: reference counts, what stands in each, its hash, its children."""
