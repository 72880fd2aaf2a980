"""Benchmarks of a running server from outside: `rekindle bench server`, and `noisy` with two tenants."""
