"""What replicas make of single objects of a tier: of those that are not what they should be, or do not come."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rekindle import Engine
from rekindle.errors import StoreError
from rekindle.tier import objects
from rekindle.tier.heads import AgentHead, decode_head
from rekindle.tier.imports import MISSES, Wanted
from rekindle.tier.maintenance import LEASE
from rekindle.tier.sealing import Sealer
from rekindle.tier.tier import ObjectTier
from tests.engine.replicas import SECRET, Replicas, ask, exported, figures, history, running
from tests.server.scripted import write_scripted_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted") / "model")


@pytest.fixture
def replicas(model: Path, tmp_path: Path) -> Iterator[Replicas]:
    yield from running(model, tmp_path)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def opened(path: Path) -> bytes:
    return Sealer(SECRET).open("/".join(path.parts[-3:]), path.read_bytes())


def sealed(path: Path, data: bytes) -> None:
    """Write an object as a replica that goes wrong would: encrypted as it should be."""
    path.write_bytes(Sealer(SECRET).seal("/".join(path.parts[-3:]), data))


@pytest.mark.parametrize("content", ["{}", '{"v": 2, "branches": []}', "another's"])
def test_a_head_that_is_none_is_replaced_unless_it_is_a_newer_one(replicas: Replicas, content: str) -> None:
    one, other = replicas.start("one"), replicas.start("other")
    first = ask(one, history())
    exported(one)
    (path,) = replicas.objects("heads")
    sealed(path, AgentHead("default", "eve").encode() if content == "another's" else content.encode())
    damaged = path.read_bytes()
    told = history(turns=[first.text, "talk on"])
    reply = ask(other, told)
    assert reply.report.reused_tokens > 0.9 * first.report.prompt_tokens, "blocks are found by their tokens"
    exported(other)
    assert (path.read_bytes() == damaged) == ("2" in content)
    if "2" not in content:
        assert ask(replicas.start("third"), told).report.outcome == "exact"
    else:
        with pytest.raises(StoreError, match="nothing was forgotten: version 2 of an agent's head"):
            other.purge("ada")


def test_an_object_that_cannot_be_written_keeps_no_other_agent_out(replicas: Replicas) -> None:
    one, other = replicas.start("one"), replicas.start("other")
    ask(one, history())
    exported(one)
    blocked, *paths = replicas.objects("blocks") + replicas.objects("heads")
    for path in (blocked, *paths):
        path.unlink()
    blocked.mkdir()
    ask(other, history())
    ask(other, history(1), "eve")
    assert other.flush()
    until(lambda: bool(replicas.objects("heads")))
    heads = [decode_head(opened(path)).agent for path in replicas.objects("heads")]
    assert heads == ["eve"], "no head before its blocks"
    until(lambda: figures(other)["waiting_exports"] == 1)
    blocked.rmdir()
    exported(other)
    assert len(replicas.objects("heads")) == 2


def test_a_process_that_hangs_with_the_lock_delays_exports_and_nothing_else(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "LOCK_S", 0.05)
    one, other = replicas.start("one"), replicas.start("other")
    first = ask(one, history())
    exported(one)
    told = history(turns=[first.text, "talk on"])
    with (replicas.tier / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = ask(other, told)
        assert second.report.outcome == "extend", "imports need no lock"
        assert other.flush()
        until(lambda: figures(other)["failures"] > 2)
        assert figures(other)["waiting_exports"] == 1 and figures(other)["is_answering"]
        tier = other.components.tier
        assert tier is not None and ".lock has been locked by another process" in (tier.problem() or "")
        with pytest.raises(StoreError, match=r"nothing was forgotten: .*\.lock has been locked"):
            other.purge("ada")
        assert other.agent_info("ada").num_tokens, "nothing has changed"
    exported(other)
    assert tier.problem() is None
    went_on = ask(replicas.start("third"), [*told, {"role": "assistant", "content": second.text}, *told[-1:]])
    assert went_on.report.reused_tokens >= second.report.prompt_tokens - 16, "nothing is lost"


def test_a_damaged_block_is_written_again_with_the_next_turn(replicas: Replicas) -> None:
    one, other = replicas.start("one"), replicas.start("other")
    first = ask(one, history())
    exported(one)
    damaged = replicas.objects("blocks")[0]
    damaged.write_bytes(b"")
    ask(other, history(turns=[first.text, "talk on"]))
    exported(other)
    assert damaged.stat().st_size, "the head names it, as it did before"


@pytest.mark.parametrize("how", ["flipped", "another's"])
def test_a_record_that_went_wrong_before_it_was_encrypted_is_not_used(replicas: Replicas, how: str) -> None:
    one, other = replicas.start("one"), replicas.start("other")
    first = ask(one, history())
    exported(one)
    paths = replicas.objects("blocks")
    contents = [opened(path) for path in paths]
    for path, content, last in zip(paths, contents, [*contents[1:], contents[0]], strict=True):
        sealed(path, last if how == "another's" else content[:-3000] + bytes([content[-3000] ^ 1]) + content[-2999:])
    told = history(turns=[first.text, "talk on"])
    reply = ask(other, told)
    assert reply.report.reused_tokens == 0 and figures(other)["imported_objects"] == 0
    assert figures(other)["bad_objects"] == 1, "what follows a damaged block is not fetched"


@contextmanager
def silent(paths: Sequence[Path]) -> Iterator[None]:
    """Have those who read these objects wait."""
    for path in paths:
        path.unlink()
        os.mkfifo(path)
    try:
        yield
    finally:
        for path in paths:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
            path.unlink()


def named(engine: Engine, replicas: Replicas) -> tuple[ObjectTier, list[Wanted]]:
    """The tier of an engine, which is not being measured, and the blocks that ada's head names."""
    tier = engine.components.tier
    assert tier is not None
    until(lambda: any(replicas.tier.glob(f"*/{LEASE}")))
    head = tier.imports.head("default", "ada", compute_s=100.0)
    assert head is not None
    return tier, [Wanted(block, (0,)) for block in head.branches[0].blocks(16)]


def evenly(wanted: Sequence[Wanted], compute_s: float) -> Callable[[int], float]:
    """How long computing the rest takes after so many tokens, if each token takes as long as any other."""
    num_tokens = sum(each.identity.num_tokens for each in wanted)
    return lambda num_come: compute_s * (1 - num_come / num_tokens)


def test_nothing_is_asked_for_where_computing_is_faster(replicas: Replicas) -> None:
    one = replicas.start("one", tier_wait_s=0.0)
    ask(one, history())
    exported(one)
    tier, wanted = named(one, replicas)
    tier.pace.latency_s = 1.0
    assert tier.imports.head("default", "ada", compute_s=23.0) is None, "no time for two answers in a twelfth"
    assert tier.imports.head("default", "ada", compute_s=25.0) is not None
    tier.pace.latency_s = 1.0
    assert not list(tier.imports.blocks(wanted, rest_s=evenly(wanted, 11.0))), "an answer takes more than a twelfth"
    assert len(list(tier.imports.blocks(wanted, rest_s=evenly(wanted, 13.0)))) == len(wanted)
    tier.pace.bytes_per_s = 1.0
    assert not list(tier.imports.blocks(wanted, rest_s=evenly(wanted, 20.0))), "so many bytes take longer"
    assert tier.breaker.reason is None


def test_a_request_waits_for_head_and_blocks_together(replicas: Replicas) -> None:
    one = replicas.start("one", tier_wait_s=0.0)
    ask(one, history())
    exported(one)
    tier, wanted = named(one, replicas)
    tier.pace.latency_s = 0.01
    with silent(replicas.objects("blocks")):
        assert not list(tier.imports.blocks(wanted, rest_s=evenly(wanted, 16.0), waited_s=0.75))
        assert tier.breaker.reason == "no answer within 0.25 s", "a sixteenth of computing, less what was waited before"


def test_a_request_with_little_time_keeps_no_other_from_asking(replicas: Replicas) -> None:
    one = replicas.start("one", tier_wait_s=0.0)
    ask(one, history())
    exported(one)
    tier, wanted = named(one, replicas)
    tier.pace.latency_s = 0.001
    with silent(replicas.objects("blocks")):
        for num in range(1, MISSES + 1):
            assert not list(tier.imports.blocks(wanted, rest_s=evenly(wanted, 0.1)))
            assert figures(one)["failures"] == num
            tier.pace.latency_s = 0.001
        assert not list(tier.imports.blocks(wanted, rest_s=evenly(wanted, 0.1)))
        assert figures(one)["failures"] == MISSES, "so often in a row, and blocks are left alone for a while"
    assert tier.breaker.reason is None, "heads are asked for, and exports go on"
    assert tier.imports.head("default", "ada", compute_s=100.0) is not None


def test_what_trickles_is_given_up_and_what_has_come_is_used(replicas: Replicas) -> None:
    one = replicas.start("one", tier_wait_s=0.0)
    ask(one, history())
    exported(one)
    tier, wanted = named(one, replicas)
    paths = {path.name: path for path in replicas.objects("blocks")}
    tier.pace.latency_s, bytes_per_s = 0.001, tier.pace.bytes_per_s
    with silent([paths[f"{each.identity.hash.hex()}.0"] for each in wanted[5:]]):
        got = list(tier.imports.blocks(wanted, rest_s=evenly(wanted, 2.0), num_named=len(wanted)))
    assert [each.identity for each in got] == [each.identity for each in wanted[:5]]
    assert figures(one)["slow_imports"] == 1 and figures(one)["failures"] == 0
    assert tier.breaker.reason is None, "it does answer"
    assert tier.pace.bytes_per_s < bytes_per_s, "the next request expects less of it"
