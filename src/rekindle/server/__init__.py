"""The HTTP server: API dialects over one engine. Knows requests and replies, neither blocks nor tensors."""
