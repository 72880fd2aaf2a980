"""OpenAI's responses API: items in, items out, and responses that are kept to be gone on from."""
