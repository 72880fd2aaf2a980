"""Ollama's dialect: bodies in, replies out, and what its clients ask about models. Knows no HTTP but its routes."""
