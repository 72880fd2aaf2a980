"""A machine that seems to have less memory: this process in a control group of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.compute.cpu import memory


def limit_memory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Put this process into a control group; its limit is what is written to the file that is returned."""
    membership = folder / "membership"
    membership.write_text("0::/\n")
    monkeypatch.setattr(memory, "MEMBERSHIP", membership)
    monkeypatch.setattr(memory, "GROUPS", folder)
    return folder / "memory.max"
