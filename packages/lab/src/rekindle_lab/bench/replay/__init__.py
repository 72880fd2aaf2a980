"""`rekindle bench day` and `replay`: a recorded or generated day against any OpenAI-compatible server."""
