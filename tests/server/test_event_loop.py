"""The server's event loop is asyncio's, whatever else is installed."""

from __future__ import annotations

import asyncio
import sys
import types

import pytest

from rekindle.config import ServerSettings
from rekindle.server.connections import ConnectionConfig


def test_an_installed_uvloop_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", types.ModuleType("uvloop"))  # as uvicorn's choice `auto` looks for it
    config = ConnectionConfig(lambda *_: None, ServerSettings())
    factory = config.get_loop_factory()
    loop = asyncio.new_event_loop() if factory is None else factory()
    try:
        assert type(loop).__module__.startswith("asyncio.")
    finally:
        loop.close()
