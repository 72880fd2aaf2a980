"""The prefix cache as a library: trie, pool and hashes, beside the figures they are held to."""
