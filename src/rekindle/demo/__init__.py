"""`rekindle demo`: four agents, a kill -9 between their turns, and a verdict."""
