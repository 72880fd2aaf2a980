"""What developers hold a change against; not in the wheel. `python -m benchmarks` lists it."""
