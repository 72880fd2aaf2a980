"""`rekindle simulate`: the share of a trace's prompts that a memory of each size would hold, and the most one could."""
