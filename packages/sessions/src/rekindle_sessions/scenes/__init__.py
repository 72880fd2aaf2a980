"""Scenarios: documents that define who talks with whom in which phases, and the player that runs them."""
