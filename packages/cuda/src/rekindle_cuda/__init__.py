"""A card by kernels in Triton."""
