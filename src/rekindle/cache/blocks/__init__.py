"""Blocks of token ids: reference counts, contents, hashes, children."""
