"""Shared parts of the measuring programs: a server process and its client, measurements with their origin, plots."""
