"""Agents over HTTP: inspected, computed ahead, changed, deleted."""
