"""Match prompts with stored branches: which branch a text continues, and why one could not be used."""
