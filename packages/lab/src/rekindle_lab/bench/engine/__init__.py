"""`rekindle bench engine`: one engine in processes of its own, next to plain `transformers`."""
