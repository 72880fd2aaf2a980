"""An engine that cannot start leaves nothing behind: no thread, no lock, and nobody else's store closed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from rekindle.compute.cpu.kernels.linear import PackedWeights, aligned_memory
from rekindle.compute.cpu.weights_file import Contents, UnsavedWeights, WeightsFile
from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.engine.started_once import WeightsWriter
from rekindle.errors import RekindleError, StoreLocked
from tests.engine.conftest import Start
from tests.given import settings_of
from tests.kernels.native import needs_kernels
from tests.tiny_models import tiny_model_dir

QUESTION = [{"role": "user", "content": "What did she say about the number?"}]


def flags(model: Path, store: Path, **more: object) -> dict[str, object]:
    given = {"threads": 1, "hot_bytes": 4 << 20, "block_tokens": 16, "kv": "q4h"}  # as `start` has them
    return {"model": str(model), "store": str(store), **given, **more}


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("rekindle")}


def open_files(directory: Path) -> list[str]:
    """Files below `directory` that this process has open."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [path for link in links if os.path.lexists(link) and (path := os.readlink(link)).startswith(str(directory))]


def test_a_second_engine_on_the_same_store_is_refused_and_harms_nobody(start: Start, tmp_path: Path) -> None:
    model, store = tiny_model_dir("llama", "fp32", tmp_path), tmp_path / "shared"
    first = start(model, store=str(store))
    threads, files = engine_threads(), sorted(open_files(store))
    second = Engine(Settings.load(flags(model, store)))
    for _ in range(2):
        with pytest.raises(StoreLocked, match="store"):
            second.start()
        assert engine_threads() == threads
        assert sorted(open_files(store)) == files
    with pytest.raises(RekindleError, match="not running"):
        second.agents()
    second.close()

    reply = first.chat("ada", QUESTION, temperature=0.0, max_tokens=3)
    assert first.flush()
    first.check()
    first.close()
    with second as heir:  # the same object, now that the store is free
        again = heir.chat("ada", QUESTION, temperature=0.0, max_tokens=3)
        assert again.report.warm_tokens > 0
        assert again.token_ids == reply.token_ids


@needs_kernels
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_kernels_read_what_is_stored_unless_torch_computes(start: Start, kernels: str) -> None:
    store = start(kernels=kernels).components.store
    assert store is not None and (store.readers.read_records is None) == (kernels == "torch")


@pytest.mark.parametrize("broken", ["template", "memory"])
def test_a_start_that_fails_half_way_leaves_nothing(tmp_path: Path, broken: str) -> None:
    model, store = tiny_model_dir("llama", "fp32", tmp_path), tmp_path / "store"
    template = model / "chat_template.jinja"
    kept = template.read_text("utf-8")
    if broken == "template":
        template.write_text("{% for message in messages %}", "utf-8")
    more = {"hot_bytes": 1 << 60} if broken == "memory" else {}
    threads = engine_threads()
    engine = Engine(Settings.load(flags(model, store, **more)))
    with pytest.raises((RekindleError, MemoryError, ValueError)):
        engine.start()
    assert engine_threads() == threads
    assert open_files(store) == []
    with pytest.raises(RekindleError, match="not running"):
        engine.agents()

    template.write_text(kept, "utf-8")
    with Engine(Settings.load(flags(model, store))) as sound:
        assert sound.chat("ada", QUESTION, temperature=0.0, max_tokens=3).report.outcome == "miss"


@needs_kernels
def test_packed_weights_are_written_once_served_and_mapped_by_the_next_start(tmp_path: Path) -> None:
    model, store = tiny_model_dir("llama", "bf16", tmp_path), tmp_path / "store"
    replies, notes, threads = [], [], engine_threads()
    for _ in range(2):
        with Engine(settings_of(**flags(model, store, map_weights="on"))) as engine:
            replies.append(engine.chat("ada", QUESTION, temperature=0.0, max_tokens=3).token_ids)
            notes.append([note for note in engine.notes if note.startswith("packed weights: ")])
        (path,) = store.glob("packed-*.bin")
        assert engine_threads() == threads
    assert replies[0] == replies[1]
    assert [len(each) for each in notes] == [1, 1]
    assert notes[0][0].endswith(f"bytes are kept in {path} for the next start")
    assert notes[1][0].endswith(f"bytes are mapped from {path}")


def test_a_stop_does_not_wait_for_a_writer_that_has_not_begun(tmp_path: Path) -> None:
    memory = aligned_memory(64)
    memory[:] = 1
    weights = Contents({"head": PackedWeights("bf16", 1, 1, memory, memory.ctypes.data)})
    writer, threads = WeightsWriter(UnsavedWeights(WeightsFile(tmp_path, "f", "k"), weights)), engine_threads()
    writer.stop()
    assert list(tmp_path.iterdir()) == []
    writer.start()  # it was stopped before
    writer.stop()
    assert list(tmp_path.iterdir()) == [] and engine_threads() == threads
