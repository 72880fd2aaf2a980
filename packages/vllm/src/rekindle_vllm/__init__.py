"""KV of another engine in our store: what it is called, its bytes as our records, when they are saved and loaded."""
