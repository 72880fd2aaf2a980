"""What computes models, one folder for each kind of device, and how a model is loaded for one.

Owns everything that knows a device's kernels: `model` has the protocol `Compute` and knows none.
"""
