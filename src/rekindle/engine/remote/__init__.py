"""Requests that another server computes: its core, what it is sent, and the model as far as it has to be known here."""
