"""Benchmarks for developers, to measure changes; not in the wheel. `python -m benchmarks` lists them."""
