"""Scenarios: documents that say who talks with whom in which phases, and how one is played."""
