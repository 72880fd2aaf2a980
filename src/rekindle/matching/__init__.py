"""Prompts meet what is stored: which branch a text goes on from, and why one could not be used."""
