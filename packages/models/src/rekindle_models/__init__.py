"""Several models by name in one server, each in a process of its own."""
