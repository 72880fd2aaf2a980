"""Another server that computes: what it serves, and requests to it as token ids over HTTP."""
