"""Sessions of several agents over HTTP: bodies, routes, events as they happen."""
