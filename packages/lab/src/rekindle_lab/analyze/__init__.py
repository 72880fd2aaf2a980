"""`rekindle analyze`: what share of any request log could have been reused, and which lines caused recomputation."""
