"""What computes models: the processor here, a card by another distribution; and how a model is loaded for one of them.

Owns everything that knows a device's kernels: `model` has the protocol `Compute` and knows none.
"""
