"""The hot tier: blocks found in memory, blocks read from disk, blocks waiting to be written."""
