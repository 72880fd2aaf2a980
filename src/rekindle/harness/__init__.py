"""A server process and clients of its HTTP, for the demo, the commands, measurements and tests."""
