"""The prefix cache as a library: trie, pool and hashes, compared with their targets."""
