"""Several agents in one conversation: who speaks, who hears what, how they decide, and scenes played from a file."""
