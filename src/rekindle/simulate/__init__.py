"""`rekindle simulate`: what share of a trace's prompts a memory of each size would have held, policy by policy."""
