"""Coordination sessions over HTTP: bodies, routes, events as they happen."""
