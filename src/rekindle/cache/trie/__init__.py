"""A radix trie: find sequences by the longest shared prefix."""
