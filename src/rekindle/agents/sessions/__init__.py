"""Coordination sessions that are held: played through the engine, watched, changed from outside."""
