"""Conversations of several agents: who speaks, who hears what, how they decide, and scenes played from a file."""
