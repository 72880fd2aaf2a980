"""Kernels for cards, interpreted on a processor unless `make gpu` runs them on the card of this machine.

`test_card.py` and `test_real_card.py` are collected there alone, `test_interpreted.py` on a processor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

IS_INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
collect_ignore = ["test_card.py", "test_real_card.py"] if IS_INTERPRETED else ["test_interpreted.py"]


@pytest.fixture(autouse=IS_INTERPRETED, scope="package")
def language_is_patched_once() -> Iterator[None]:
    """The interpreter looks through Triton's whole language whenever a kernel calls a function, which takes it a
    millisecond: of the functions of a module once is enough."""
    from triton.runtime.interpreter import InterpretedFunction

    own, modules = InterpretedFunction.__call__, set[str]()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ in modules:
            return self.rewrite()(*args, **kwargs)
        modules.add(self.fn.__module__)
        return own(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", call)
        yield


@pytest.fixture(autouse=IS_INTERPRETED)
def many_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other, and takes as long for one of many rows."""
    monkeypatch.setattr("rekindle_cuda.attention.STORED_ROWS", 32)
    monkeypatch.setattr("rekindle_cuda.packing.ROWS", 128)
    monkeypatch.setattr("rekindle_cuda.packing.BLOCKS", 256)
