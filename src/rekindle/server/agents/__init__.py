"""Agents over HTTP: looked at, computed ahead, changed, deleted."""
