"""Benchmarks of the object tier: replicas in this process or in processes of their own, on one directory."""
