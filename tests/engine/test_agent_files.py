"""An agent goes to another machine as a file: engines with stores and secrets of their own, in one process or two."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from rekindle import Engine
from rekindle.engine.types import AgentInfo, ChatResult, Imported
from rekindle.errors import BadRequest, NotFound, StoreError
from rekindle.store.agent_file import AgentFileReader, FileBlock, written
from tests.engine.replicas import ask, history
from tests.proofs import proved
from tests.server.scripted import write_scripted_model
from tests.tiny_models import tiny_model_dir

TURNS = ("talk of the harbour", "talk of the lighthouse")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted") / "model")


def engine_of(model: Path, directory: Path, **settings: Any) -> Engine:
    given: dict[str, Any] = {"threads": 1, "hot_bytes": 16 << 20, "block_tokens": 16, "anticipate": "off"}
    given["store"] = directory
    return proved(Engine(model=str(model), **{**given, **settings}))


class Machines:
    """Starts engines, each with a store of its own; one of the same name goes on with the store of the one before."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model = model
        self.directory = directory
        self.running: dict[str, Engine] = {}

    def start(self, name: str, model: Path | None = None, **settings: Any) -> Engine:
        self.running[name] = engine_of(model or self.model, self.directory / name, **settings)
        return self.running[name]


@pytest.fixture
def machines(model: Path, tmp_path: Path) -> Iterator[Machines]:
    started = Machines(model, tmp_path)
    try:
        yield started
    finally:
        for engine in started.running.values():
            engine.close()


@dataclass(frozen=True)
class Exported:
    """An agent's file, what it was, how its first conversation goes on, and with which reply."""

    data: bytes
    was: AgentInfo
    told: list[dict[str, str]]
    reply: ChatResult


def exported(engine: Engine) -> Exported:
    told = spoken(engine)
    agent = engine.agent("ada")
    data, was = b"".join(agent.export()), agent.info()
    return Exported(data, was, told, ask(engine, told))


@pytest.fixture(scope="module")
def file(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    with engine_of(model, tmp_path_factory.mktemp("here")) as engine:
        return exported(engine)


def spoken(engine: Engine, agent: str = "ada") -> list[dict[str, str]]:
    """Have an agent speak, and a second time from where the first conversation began; return what goes on with it."""
    words: list[str] = []
    for turn in TURNS:
        words += [ask(engine, history(turns=words), agent).text, turn]
    ask(engine, history(turns=[words[0], "talk of something else"]), agent)
    return history(turns=words)


def of(data: bytes) -> Callable[[], BinaryIO]:
    return lambda: io.BytesIO(data)


def imported(engine: Engine, data: bytes, agent: str = "ada", **more: Any) -> Imported:
    return engine.agent(agent).import_file(of(data), **more)


def block_of(data: bytes) -> FileBlock:
    """Return the first block of a file."""
    reader = AgentFileReader(io.BytesIO(data))
    list(reader.texts())
    return next(reader.blocks())


def test_an_agent_goes_on_elsewhere_as_where_it_was(machines: Machines, file: Exported) -> None:
    there, was = machines.start("there"), file.was
    came = imported(there, file.data, "bo")
    info = there.agent("bo").info()
    assert came == Imported("bo", was.num_tokens, was.num_tokens)
    assert info.saved_tokens == was.num_tokens and info.hot_tokens == 0
    assert [each.num_turns for each in info.branch_infos] == [each.num_turns for each in was.branch_infos]
    moved = ask(there, file.told, "bo")
    assert moved.report.outcome == file.reply.report.outcome == "extend"
    assert moved.report.reused_tokens == file.reply.report.reused_tokens, "nothing but the new tokens is computed"
    assert (moved.prompt_ids, moved.token_ids) == (file.reply.prompt_ids, file.reply.token_ids)
    there.check()
    purged = there.agent("bo").purge()
    assert purged.slots_freed and purged.blocks_shared == 0
    stats = there.stats().store
    assert stats is not None and stats["num_blocks"] == stats["num_agents"] == 0


@pytest.mark.parametrize("kind", ["gemma3", "qwen3.5"])
def test_windows_and_states_go_along_and_last(kind: str, tmp_path: Path) -> None:
    model = tiny_model_dir(kind, "fp32", tmp_path / "models")
    with engine_of(model, tmp_path / "here") as here:
        file = exported(here)
    with engine_of(model, tmp_path / "there") as there:
        assert imported(there, file.data).without_kv is None
    with engine_of(model, tmp_path / "there") as there:
        moved = ask(there, file.told)
        assert moved.report.computed_tokens <= file.reply.report.computed_tokens + 16, "all but one block"
        assert moved.token_ids == ask(there, file.told, "nobody", reuse="off").token_ids
        there.check()


def test_texts_alone_where_another_model_reads_the_same(machines: Machines, file: Exported, tmp_path: Path) -> None:
    wider = machines.start("wider", block_tokens=32)
    came = imported(wider, file.data)
    assert (came.num_tokens, came.kv_tokens) == (file.was.num_tokens, 0)
    assert came.without_kv is not None and came.without_kv.endswith("(these differ: block_tokens)")
    computed = ask(wider, file.told)
    assert computed.report.reused_tokens == 0 and computed.prompt_ids == file.reply.prompt_ids
    assert imported(wider, file.data, "bo", kv="off").without_kv == "it was left out, as asked"
    assert ask(wider, file.told, "bo").token_ids == file.reply.token_ids
    wider.check()
    stranger = machines.start("stranger", tiny_model_dir("llama", "fp32", tmp_path / "models"))
    with pytest.raises(BadRequest, match="its token ids mean other texts to the model that is served here than to"):
        imported(stranger, file.data)
    assert stranger.agents() == []


def test_kv_that_is_missing_is_computed(machines: Machines, file: Exported) -> None:
    there = machines.start("there")
    came = imported(there, with_blocks(file.data, lambda blocks: blocks[:5]))
    assert (came.num_tokens, came.kv_tokens) == (file.was.num_tokens, 5 * 16)
    moved = ask(there, file.told)
    assert moved.report.reused_tokens == 5 * 16 and moved.prompt_ids == file.reply.prompt_ids
    assert moved.token_ids == file.reply.token_ids
    assert imported(there, with_blocks(file.data, lambda blocks: blocks[:5]), "bo") == replace(came, agent="bo")
    there.check()
    there.close()
    there = machines.start("there")
    assert there.agent("bo").info().num_tokens == 5 * 16, "what was not computed is not remembered"
    assert ask(there, file.told).report.outcome == "exact"


def test_a_purge_meanwhile_of_somebody_else_costs_one_more_reading(machines: Machines, file: Exported) -> None:
    there = machines.start("there")
    spoken(there, "eve")
    opened: list[BinaryIO] = []

    class Read(io.BytesIO):
        """Of the second reading all blocks are on disk when it ends, and in no branch yet."""

        def __exit__(self, *error: Any) -> None:
            if len(opened) == 2:
                there.agent("eve").purge()
            super().__exit__(*error)

    def open_file() -> BinaryIO:
        opened.append(Read(file.data))
        return opened[-1]

    came = there.agent("ada").import_file(open_file)
    assert len(opened) == 3 and came.kv_tokens == came.num_tokens
    assert [each.agent for each in there.agents()] == ["ada"]
    there.check()
    assert ask(there, file.told).text == file.reply.text


def test_a_rewind_to_nothing_lasts(machines: Machines, file: Exported) -> None:
    """A turn ends at 0 where another reply took the place of all of it."""
    reader = AgentFileReader(io.BytesIO(file.data))
    text, *_ = reader.texts()
    head = replace(reader.head, num_tokens=reader.head.num_tokens[:1], turn_ends=((0, len(text.ids)),))
    there = machines.start("there")
    imported(there, b"".join(written(head, [text], ())), "cold")
    assert imported(there, b"".join(written(head, [text], [block_of(file.data)]))).kv_tokens == 16
    for agent in ("cold", "ada"):
        assert there.agent(agent).rewind(1) == 0
        with pytest.raises(NotFound):
            there.agent(agent).info()
    there.check()
    there.close()
    assert machines.start("there").agents() == []


def test_damaged_kv_is_left_out_of_a_file(machines: Machines, file: Exported) -> None:
    with engine_of(machines.model, machines.directory / "here") as here:
        spoken(here)
    reader = AgentFileReader(io.BytesIO(file.data))
    list(reader.texts())
    blocks = list(reader.blocks())
    (shard,) = (machines.directory / "here").glob("*/blocks-0-000.safetensors")
    with shard.open("r+b") as written_to:
        at = written_to.read(4 << 20).index(blocks[8].payloads[0].tobytes())
        written_to.seek(at + 100)
        written_to.write(bytes([blocks[8].payloads[0][100] ^ 1]))
    here = machines.start("here")
    data = b"".join(here.agent("ada").export())
    assert len(data) < len(file.data)
    there = machines.start("there", disk_writes_a_day=20_000)
    with pytest.raises(StoreError, match="nothing is written today any more"):
        imported(there, data)
    assert there.agents() == []
    there.close()
    there = machines.start("there")
    came = imported(there, data)
    assert came == Imported("ada", file.was.num_tokens, 8 * 16)
    moved = ask(there, file.told)
    assert (moved.prompt_ids, moved.token_ids) == (file.reply.prompt_ids, file.reply.token_ids)
    assert moved.report.reused_tokens == came.kv_tokens


def test_what_cannot_be_taken_in_is_refused_and_changes_nothing(machines: Machines, file: Exported) -> None:
    there, data = machines.start("there", max_branches=2), file.data
    ask(there, history(3))
    with pytest.raises(BadRequest, match="agent 'ada' has a memory already: delete it, or choose another id"):
        imported(there, data)
    with pytest.raises(NotFound, match="no agent 'nobody'"):
        there.agent("nobody").export()
    assert there.flush()
    before = there.stats().store, there.agents()
    for at in (*range(0, 64, 7), *range(64, len(data), len(data) // 40), len(data) - 1):
        with pytest.raises(BadRequest, match="nothing has changed: "):
            imported(there, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "bo")
        with pytest.raises(BadRequest, match=r"nothing has changed: (it ends too early|this is no agent's file)"):
            imported(there, data[:at], "bo")
    with pytest.raises(BadRequest, match="there is more after its end"):
        imported(there, data + b"x", "bo")
    for blocks, why in (
        (lambda each: each[::-1], "its blocks are out of order"),
        (lambda each: [each[1], *each], "its blocks are out of order"),
        (lambda each: [replace(each[0], number=10_000)], "it has a block after the end of its text"),
    ):
        with pytest.raises(BadRequest, match=why):
            imported(there, with_blocks(data, blocks), "bo")
    with pytest.raises(BadRequest, match=r"it has 3 branches, and an agent keeps 2 here \(max_branches\)"):
        imported(there, several(data, 3), "bo")
    with pytest.raises(BadRequest, match="its token ids mean other texts"):
        imported(there, several(data, 1, content=b"Remember that the copper key is in the cellar."), "bo")
    assert (there.stats().store, there.agents()) == before


def with_blocks(data: bytes, change: Callable[[list[FileBlock]], list[FileBlock]]) -> bytes:
    """A file with other blocks."""
    reader = AgentFileReader(io.BytesIO(data))
    texts = list(reader.texts())
    return b"".join(written(reader.head, texts, change(list(reader.blocks()))))


def several(data: bytes, num: int, **changed: Any) -> bytes:
    """A file of an agent whose first branch is there so many times, without blocks."""
    reader = AgentFileReader(io.BytesIO(data))
    text, ends = replace(next(reader.texts()), **changed), reader.head.turn_ends[:1]
    head = replace(reader.head, num_tokens=(len(text.ids),) * num, turn_ends=ends * num)
    return b"".join(written(head, [text] * num, ()))


def test_limits_of_an_engine_are_those_of_its_imports(machines: Machines, file: Exported) -> None:
    short = machines.start("short", max_context=64)
    with pytest.raises(BadRequest, match=r"and prompts have 64 here: serve with a larger context \(max_context\)"):
        imported(short, file.data)
    storeless = engine_of(machines.model, machines.directory / "none", store="off")
    with storeless, pytest.raises(StoreError, match="without a store agents are neither exported nor imported"):
        imported(storeless, file.data)


def test_a_full_store_refuses_it_whole(machines: Machines) -> None:
    here, small = machines.start("here"), machines.start("small", disk_bytes=256 << 10)
    for number in range(3):
        ask(here, history(number, days=40))
    with pytest.raises(BadRequest, match=r"bytes of KV, and the store 262,144 in all \(disk_bytes\)"):
        imported(small, b"".join(here.agent("ada").export()))
    assert small.agents() == []


AT_WORK = """
import sys
import time
from itertools import count
from pathlib import Path
from tests.engine.test_agent_files import engine_of, of
model, store, file = map(Path, sys.argv[1:])
engine, data = engine_of(model, store), file.read_bytes()
for number in count():
    engine.agent("ada", namespace=f"n{number}").import_file(of(data))
    print(number, flush=True)
"""


def test_an_import_that_is_killed_is_whole_or_nothing(machines: Machines, file: Exported) -> None:
    path = machines.directory / "ada.agent"
    path.write_bytes(file.data)
    command = [sys.executable, "-c", AT_WORK, str(machines.model), str(machines.directory / "there"), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
        time.sleep(random.uniform(0.0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
    there = machines.start("there")
    found = {info.namespace for info in there.agents()}
    assert found >= {"n0", "n1", "n2"}
    for namespace in found:
        info = there.agent("ada", namespace=namespace).info()
        assert (info.saved_tokens, info.branches) == (file.was.num_tokens, file.was.branches)
        assert ask(there, file.told, namespace=namespace).report.reused_tokens == file.reply.report.reused_tokens
    there.check()
