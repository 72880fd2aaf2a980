"""One forward step and one sample of any causal language model of `transformers`.

Owns the transformers model: nothing outside this folder calls it. Knows blocks only as indices passed with each step;
knows nothing of requests over time, queues or HTTP.
"""
