"""Benchmarks. They reach the server over HTTP like any client."""
