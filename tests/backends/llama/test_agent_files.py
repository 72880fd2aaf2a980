"""Agents of a front of llama.cpp as files, before the imitation: rows, windows and states go to another machine."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.backends.llama.test_slot_memory import Talk, front, kept

__all__ = ["kept"]
pytestmark = pytest.mark.usefixtures("program")


def test_an_agent_goes_on_before_another_llama_server(gguf: Path, tmp_path: Path, kept: str) -> None:
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "here") as engine:
        for agent in "abc":
            talk.turn(engine, agent, 300)
            talk.turn(engine, agent)
        data = b"".join(engine.agent("a").export())
    with front(gguf, tmp_path / "there") as engine:
        came = engine.agent("a").import_file(lambda: io.BytesIO(data))
        assert came.without_kv is None and came.kv_tokens > came.num_tokens - 64
    with front(gguf, tmp_path / "there") as engine:
        assert talk.turn(engine, "a") <= 20 + 1 + (63 if kept == "rows" else 0), "tails of rows alone are not on disk"
        engine.check()
        assert engine.agent("a").purge().slots_freed > 0
    with front(gguf, tmp_path / "other", more="-fa on") as engine:
        came = engine.agent("a").import_file(lambda: io.BytesIO(data))
        assert came.kv_tokens == 0 and came.without_kv is not None and "is not what computes here" in came.without_kv
        assert talk.turn(engine, "a") > 300, "texts alone"
