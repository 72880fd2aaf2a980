"""Processing of a request from its body to the end of its answer, whole or streamed, shared by all dialects."""
