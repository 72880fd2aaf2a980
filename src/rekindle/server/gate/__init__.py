"""Admission of requests: API keys and namespaces, accepted hosts, size and rate limits."""
