"""The CPU: kernels in C++, packed weights, and the layers and modules that are computed over them in one call."""
