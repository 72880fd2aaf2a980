"""Rekindle's laboratory: its benchmarks, the analysis of request logs, and simulators of caches and fleets."""
