"""`rekindle eval`: what KV formats cost a model in quality."""
