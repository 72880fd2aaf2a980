"""Server processes and clients of their HTTP, for the demo, the commands, engines elsewhere, measurements and tests."""
