"""The engine behind a socket of the server's tests."""

from tests.server.conftest import served

__all__ = ["served"]
