"""Anthropic's dialect: bodies in, replies out. Knows no HTTP."""
