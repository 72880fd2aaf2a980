"""Kernels in C++ for the CPU: how they are built, found and called. They know memory and instruction sets only."""
