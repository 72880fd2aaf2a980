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
from rekindle_tier import objects
from rekindle_tier.heads import AgentHead, decode_head
from rekindle_tier.imports import MISSES, Imports, Wanted
from rekindle_tier.location import open_location
from rekindle_tier.objects import Objects
from rekindle_tier.pace import Breaker, Pace
from rekindle_tier.records import Records
from rekindle_tier.sealing import Sealer
from tests.engine.replicas import SECRET, Replicas, ask, exported, figures, history, running
from tests.server.scripted import write_scripted_model

HOURS_S = 10_000.0  # computing takes so long that an answer which comes is waited for


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
            other.agent("ada").purge()


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
            other.agent("ada").purge()
        assert other.agent("ada").info().num_tokens, "nothing has changed"
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


class Clock:
    """Time that passes when a test says so: no test depends on how soon its threads get their turn."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def asking(engine: Engine, replicas: Replicas, clock: Clock) -> Iterator[tuple[Imports, Pace, Breaker, list[Wanted]]]:
    """Imports into an engine's store by this clock, and the blocks that ada's head names."""
    assert engine.components.store is not None
    sealer, prefix = Sealer(SECRET), engine.spec.fingerprint.hex()
    opened = Objects(open_location(str(replicas.tier)), sealer, prefix, directory=replicas.tier)
    pace, breaker = Pace(clock=clock), Breaker(clock)
    records = Records(engine.components.store, engine.spec.layout)
    try:
        imports = Imports(opened, records, breaker, pace, wait_s=0.0, clock=clock)
        head = imports.head("default", "ada", compute_s=HOURS_S)
        assert head is not None
        yield imports, pace, breaker, [Wanted(block, (0,)) for block in head.branches[0].blocks(16)]
    finally:
        opened.close()


def evenly(wanted: Sequence[Wanted], compute_s: float) -> Callable[[int], float]:
    """How long computing the rest takes after so many tokens, if each token takes as long as any other."""
    num_tokens = sum(each.identity.num_tokens for each in wanted)
    return lambda num_come: compute_s * (1 - num_come / num_tokens)


def test_nothing_is_asked_for_where_computing_is_faster(replicas: Replicas) -> None:
    one = replicas.start("one")
    ask(one, history())
    exported(one)
    with asking(one, replicas, Clock()) as (imports, pace, breaker, wanted):
        pace.latency_s = 100.0
        assert imports.head("default", "ada", compute_s=2300.0) is None, "no time for two answers in a twelfth"
        assert imports.head("default", "ada", compute_s=2500.0) is not None
        pace.latency_s = 100.0
        assert not list(imports.blocks(wanted, rest_s=evenly(wanted, 1100.0))), "an answer takes more than a twelfth"
        assert len(list(imports.blocks(wanted, rest_s=evenly(wanted, 1300.0)))) == len(wanted)
        pace.latency_s, pace.bytes_per_s = 0.0, 1.0
        assert not list(imports.blocks(wanted, rest_s=evenly(wanted, 1300.0))), "so many bytes take longer"
        assert breaker.reason is None and not imports.counts.sums()["failures"]


def test_a_request_waits_for_head_and_blocks_together(replicas: Replicas) -> None:
    one = replicas.start("one")
    ask(one, history())
    exported(one)
    with asking(one, replicas, Clock()) as (imports, pace, breaker, wanted), silent(replicas.objects("blocks")):
        pace.latency_s = 0.01
        assert not list(imports.blocks(wanted, rest_s=evenly(wanted, 16.0), waited_s=0.75))
        assert breaker.reason == "no answer within 0.25 s", "a sixteenth of computing, less what was waited before"


def test_a_request_with_little_time_keeps_no_other_from_asking(replicas: Replicas) -> None:
    one = replicas.start("one")
    ask(one, history())
    exported(one)
    with asking(one, replicas, Clock()) as (imports, pace, breaker, wanted):
        with silent(replicas.objects("blocks")):
            for num in range(1, MISSES + 1):
                pace.latency_s = 0.001
                assert not list(imports.blocks(wanted, rest_s=evenly(wanted, 0.1)))
                assert imports.counts.sums()["failures"] == num
            pace.latency_s = 0.001
            assert not list(imports.blocks(wanted, rest_s=evenly(wanted, 0.1)))
            assert imports.counts.sums()["failures"] == MISSES, "so often in a row, and blocks are left for a while"
        assert breaker.reason is None, "heads are asked for, and exports go on"
        assert imports.head("default", "ada", compute_s=HOURS_S) is not None


def test_what_trickles_is_given_up_and_what_has_come_is_used(replicas: Replicas) -> None:
    one, clock = replicas.start("one"), Clock()
    ask(one, history())
    exported(one)
    with asking(one, replicas, clock) as (imports, pace, breaker, wanted):
        paths = {path.name: path for path in replicas.objects("blocks")}
        pace.latency_s, bytes_per_s = 0.001, pace.bytes_per_s
        with silent([paths[f"{each.identity.hash.hex()}.0"] for each in wanted[5:]]):
            arriving = imports.blocks(wanted, rest_s=evenly(wanted, 1600.0), num_named=len(wanted))
            got = [next(arriving) for _ in range(5)]
            clock.now += 99.95
            got += arriving
        assert [each.identity for each in got] == [each.identity for each in wanted[:5]]
        counts = imports.counts.sums()
        assert counts["slow"] == 1 and not counts["failures"]
        assert counts["waited_ns"] == 99.95e9, "less than a sixteenth"
        assert breaker.reason is None, "it does answer"
        assert pace.bytes_per_s < bytes_per_s, "the next request expects less of it"
