"""The hot tier: which blocks a prompt finds in memory, what is read from disk for it, what waits to be written."""
