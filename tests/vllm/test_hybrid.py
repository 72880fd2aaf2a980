"""Windows and recurrent states under a stub of an engine: it resumes at points where all that it needs is stored."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.parts import FULL, STATE, WindowPart
from rekindle_vllm.planner import PAUSE
from rekindle_vllm.requests import EngineRequest, Reuse, Scheduled
from rekindle_vllm.steps import StepReport
from tests.vllm.engine import DEFAULT, reply_of
from tests.vllm.hybrid import HybridEngine, HybridRequest, Kind
from tests.vllm.stored import STATE_OFFSET, Stores, check_parts, damage, prompt, records_of

WINDOWS = Kind(((FULL, 16), (WindowPart(64), 16), (WindowPart(64), 16)))
STATES = Kind(((FULL, 16), (STATE, 64)))
BOTH = Kind(((FULL, 16), (WindowPart(64), 16), (WindowPart(64), 16), (STATE, 64)))
KINDS = {"windows": WINDOWS, "states": STATES, "both": BOTH}
# By blocks and records: the tokens that a text of 340 gives a new process, and the records whose other parts are kept.
SIZES = {
    "windows": (WINDOWS, 320, {1, 3, 4}),
    "states": (STATES, 320, {1, 3, 4}),
    "both": (BOTH, 320, {1, 3, 4}),
    "two windows": (Kind(((FULL, 16), (WindowPart(64), 16), (WindowPart(128), 32))), 320, {0, 1, 2, 3, 4}),
    "two groups of full attention": (Kind(((FULL, 16), (FULL, 32), (WindowPart(64), 16))), 320, {1, 3, 4}),
    "two groups of states": (Kind(((FULL, 16), (STATE, 64), (STATE, 64))), 320, {1, 3, 4}),
    "several records in a block": (Kind(((FULL, 128), (WindowPart(64), 16), (STATE, 64))), 256, {1, 3}),
    "windows of several records": (Kind(((FULL, 16), (WindowPart(100), 128))), 256, {0, 1, 2, 3}),
    "blocks longer than windows": (Kind(((FULL, 16), (WindowPart(48), 256), (STATE, 64))), 256, {0, 1, 2, 3}),
    "blocks across records": (Kind(((FULL, 48), (WindowPart(64), 16))), 192, {2}),
    "windows across records": (Kind(((FULL, 16), (WindowPart(64), 48), (STATE, 192))), 192, {1, 2}),
    "small records": (
        Kind(((FULL, 16), (WindowPart(48), 16), (STATE, 32)), record=16),
        320,
        {5, 6, 7, *range(15, 20)},
    ),
}


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    made = Stores(tmp_path)
    yield made
    made.close()


def engine_of(stores: Stores, kind: Kind, staging_bytes: int = 1 << 24, **settings: object) -> HybridEngine:
    """An engine in a new process."""
    return HybridEngine(stores.open("native", staging_bytes, kind.layout()), kind, **settings)


def ended(parts: list[list[int]]) -> set[int]:
    """The records that have more than full attention."""
    return {number for number, own in enumerate(parts) if len(own) > 1}


@pytest.mark.parametrize("name", SIZES)
def test_a_new_process_continues_from_disk(stores: Stores, name: str) -> None:
    kind, reused, kept = SIZES[name]
    ids = prompt(300)
    first = engine_of(stores, kind)
    ids += first.serve("a", ids, 40)
    assert ids == prompt(300) + reply_of(prompt(300), 40) and first.reuse["a"] == Reuse(300, 0, 0, 0)
    first.check_blocks()
    parts = check_parts(first.owner, kind, ids)
    assert len(parts) == 339 // kind.record and ended(parts) == kept
    second = engine_of(stores, kind)
    longer = ids + prompt(40, 1)
    assert second.serve("b", longer, 5) == reply_of(longer, 5)
    assert second.reuse["b"] == Reuse(380, 0, reused, 0)
    second.check_blocks()
    check_parts(second.owner, kind, longer)


@pytest.mark.parametrize("name", KINDS)
def test_a_text_that_leaves_another_resumes_at_an_earlier_point(stores: Stores, name: str) -> None:
    kind, ids = KINDS[name], prompt(300)
    engine_of(stores, kind).serve("a", ids, 40)
    engine = engine_of(stores, kind)
    for number, (end, reused) in enumerate(((290, 256), (200, 128), (100, 0))):
        engine.forget_hot()
        longer = ids[:end] + prompt(60, 3 + number)
        assert engine.serve(f"b{number}", longer, 3) == reply_of(longer, 3)
        assert engine.reuse[f"b{number}"] == Reuse(end + 60, 0, reused, 0)


@pytest.mark.parametrize(("name", "hot"), [("windows", 96), ("states", 64), ("both", 64)])
def test_hot_tokens_come_first(stores: Stores, name: str, hot: int) -> None:
    kind, ids = KINDS[name], prompt(300)
    engine_of(stores, kind).serve("a", ids, 3)
    engine = engine_of(stores, kind)
    engine.serve("b", ids[:100])
    assert engine.serve("c", ids, 3) == reply_of(ids, 3)
    assert engine.reuse["c"] == Reuse(300, hot, 256 - hot, 0)
    assert engine.serve("d", ids, 3) == reply_of(ids, 3)
    assert engine.reuse["d"].hot >= 256 and engine.reuse["d"].loaded == 0
    engine.check_blocks()


def test_requests_that_share_a_prefix_are_loaded_and_computed_together(stores: Stores) -> None:
    shared = prompt(200)
    engine_of(stores, BOTH).serve("a", shared, 3)
    engine = engine_of(stores, BOTH)
    prompts = {f"r{number}": shared + prompt(90, number) for number in range(4)}
    for name, ids in prompts.items():
        engine.add(HybridRequest(name, list(ids), 20))
    engine.drain()
    for name, ids in prompts.items():
        assert engine.replies[name] == reply_of(ids, 20)
        assert engine.reuse[name].reused == 192
        assert len(check_parts(engine.owner, BOTH, ids)) == 4
    engine.check_blocks()


@pytest.mark.parametrize("name", KINDS)
def test_what_a_conversation_keeps_of_windows_and_states_does_not_grow(stores: Stores, name: str) -> None:
    """The first two points, the prompt's last and the last: of windows up to two records each, of states one, and the
    one before the end."""
    kind, ids = KINDS[name], prompt(150)
    for turn in range(4):
        engine = engine_of(stores, kind, budget=64)
        for half in range(2):
            ids += engine.serve(f"{turn} {half}", ids, 100, agent="ada")
        parts = check_parts(engine.owner, kind, ids)
        for part in range(1, len(kind.layout().parts)):
            kept = sum(part in own for own in parts)
            assert kept <= (5 if kind.layout().parts[part].states else 8), f"{kept} records have part {part}"
        assert part in parts[-1]
        assert engine.serve(f"{turn} again", [*ids, 5], 2) == reply_of([*ids, 5], 2)
        assert engine.reuse[f"{turn} again"].reused >= len(ids) - 100


@pytest.mark.parametrize("name", KINDS)
def test_a_preempted_request_resumes_from_disk(stores: Stores, name: str) -> None:
    kind, ids = KINDS[name], prompt(250)
    engine = engine_of(stores, kind, budget=64)
    request = HybridRequest("a", list(ids), 20)
    engine.add(request)
    for _ in range(5):
        engine.step()
    engine.forget_hot()
    engine.preempt(request)
    assert engine.owner.store.flush(10)
    engine.drain()
    assert engine.replies["a"] == reply_of(ids, 20)
    assert engine.owner.stats().blocks_read >= 4
    assert len(check_parts(engine.owner, kind, request.ids)) == 4
    assert engine.reuse["a"] == Reuse(250, 0, 0, 0)  # of the prompt, when it began


@pytest.mark.parametrize("name", KINDS)
def test_a_crowded_engine_preempts_and_every_reply_is_right(stores: Stores, name: str) -> None:
    kind = KINDS[name]
    prompts = {f"r{number}": prompt(150 + 20 * number, number % 3) for number in range(6)}
    for _ in range(2):  # the second time, several wait for their loads
        engine = engine_of(stores, kind, num_blocks=70, budget=90)
        for request, ids in prompts.items():
            engine.add(HybridRequest(request, list(ids), 30))
        engine.drain()
        engine.check_blocks()
        for request, ids in prompts.items():
            assert engine.replies[request] == reply_of(ids, 30)
            check_parts(engine.owner, kind, ids + engine.replies[request])
    assert all(engine.reuse[request].reused >= 128 for request in prompts)


@pytest.mark.parametrize("name", KINDS)
def test_a_request_that_ends_while_it_waits_keeps_its_blocks_until_they_are_loaded(stores: Stores, name: str) -> None:
    kind, ids = KINDS[name], prompt(300)
    engine_of(stores, kind).serve("a", ids)
    engine = engine_of(stores, kind)
    request = HybridRequest("b", list(ids), 5)
    engine.add(request)
    engine.begin()
    assert list(engine.loading) == ["b"]
    engine.abort(request)
    engine.check_blocks()
    engine.end()
    assert request.tables == () and engine.reuse["b"] is None
    engine.check_blocks()
    assert engine.serve("c", ids, 5) == reply_of(ids, 5) and engine.reuse["c"] == Reuse(300, 0, 256, 0)


@pytest.mark.parametrize("name", KINDS)
def test_a_full_staging_buffer_loses_nothing_but_time(stores: Stores, name: str) -> None:
    kind, ids = KINDS[name], prompt(480)
    engine = engine_of(stores, kind, 1, patience_s=0.0, budget=64)
    ids += engine.serve("a", ids, 70)
    assert ids == prompt(480) + reply_of(prompt(480), 70)
    check_parts(engine.owner, kind, ids)
    assert engine.owner.stats().blocks_orphaned == 0
    engine = engine_of(stores, kind)
    assert engine.serve("b", [*ids, 5], 3) == reply_of([*ids, 5], 3) and engine.reuse["b"].failed == 0


def test_workers_share_windows_by_heads(stores: Stores) -> None:
    ids, rows = prompt(300), []
    for writers, readers in ((2, 1), (1, 2)):
        engine = engine_of(stores, WINDOWS, num_workers=writers)
        ids += engine.serve("a", ids, 40)
        rows.append(check_parts(engine.owner, WINDOWS, ids))
        engine.close()
        engine = engine_of(stores, WINDOWS, num_workers=readers)
        assert engine.serve("b", [*ids, 5], 3) == reply_of([*ids, 5], 3)
        assert engine.reuse["b"].loaded == len(ids) // 64 * 64
        engine.close()
    assert ids[300:340] == reply_of(prompt(300), 40)


def test_all_workers_match_again_what_one_could_not_load(stores: Stores) -> None:
    ids = prompt(300)
    reply = engine_of(stores, WINDOWS).serve("a", ids, 5)
    owner = stores.open(layout=WINDOWS.layout())
    damage(stores.directory, records_of(owner, ids)[3], 1)
    engine = HybridEngine(owner, WINDOWS, num_workers=2)
    assert engine.serve("b", ids, 5) == reply and engine.reuse["b"] == Reuse(300, 0, 128, 128)
    check_parts(owner, WINDOWS, ids)
    engine.check_blocks()
    engine.close()


@pytest.mark.parametrize("name", KINDS)
def test_only_tokens_within_the_limit_are_kept(stores: Stores, name: str) -> None:
    kind, ids = KINDS[name], prompt(300)
    for _ in range(2):
        engine = engine_of(stores, kind)
        engine.add(HybridRequest("a", list(ids), 70, limit=150))
        engine.drain()
        assert engine.replies["a"] == reply_of(ids, 70)
        assert [len(own) > 1 for own in check_parts(engine.owner, kind, ids)] == [False, True]
    assert engine.reuse["a"] == Reuse(300, 0, 128, 0)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("after", "reused"), [(3, 0), (7, 256), (20, 256)])
def test_after_a_kill_whole_points_are_left(tmp_path: Path, name: str, after: int, reused: int) -> None:
    """The directory as it is after some steps: in the first three no prompt is complete, so that nothing covers it."""
    kind, stores, ids = KINDS[name], Stores(tmp_path / "first"), prompt(300)
    engine = engine_of(stores, kind, budget=64)
    request = HybridRequest("a", list(ids), 60)
    engine.add(request)
    for _ in range(after):
        engine.step()
    assert engine.owner.store.flush(10)
    subprocess.run(["cp", "-r", "--sparse=always", tmp_path / "first", tmp_path / "second"], check=True)
    stores.close()
    stores = Stores(tmp_path / "second")
    engine = engine_of(stores, kind)
    check_parts(engine.owner, kind, ids)
    assert engine.serve("b", [*ids, 5], 3) == reply_of([*ids, 5], 3)
    assert engine.reuse["b"] == Reuse(301, 0, reused, 0) and not engine.spoilt
    assert engine.serve("c", ids, 60) == reply_of(ids, 60)
    check_parts(engine.owner, kind, ids + engine.replies["c"])
    stores.close()


DAMAGED = [
    (name, part, record)
    for name, kind in KINDS.items()
    for part in range(len(kind.layout().parts))
    for record in (1, 3)
]


@pytest.mark.parametrize(("name", "part", "record"), DAMAGED)
def test_a_damaged_part_is_matched_again_and_saved_again(stores: Stores, name: str, part: int, record: int) -> None:
    """Of records 1 and 3 all parts are stored, as the points after 128 and 256 tokens need them."""
    kind, ids = KINDS[name], prompt(300)
    reply = engine_of(stores, kind).serve("a", ids, 5)
    owner = stores.open(layout=kind.layout())
    before = check_parts(owner, kind, ids)
    assert ended(before) == {1, 3}
    damage(stores.directory, records_of(owner, ids)[record], part, STATE_OFFSET)
    engine = HybridEngine(owner, kind)
    assert engine.serve("b", ids, 5) == reply
    needs = part == 0 or record == 3  # for the last point
    reused = (128 if record == 3 else 0) if needs else 256
    assert engine.reuse["b"] == Reuse(300, 0, reused, 256 - reused)
    assert owner.stats().bad_records == needs
    again = engine_of(stores, kind)
    assert again.serve("c", ids, 5) == reply and again.reuse["c"] == Reuse(300, 0, 256, 0)
    if needs:
        assert check_parts(again.owner, kind, ids) == before


def test_a_record_that_is_found_and_never_read_is_computed(stores: Stores) -> None:
    """As where threads that read have died: the planner does not ask for it again and again."""
    ids = prompt(300)
    engine_of(stores, BOTH).serve("a", ids, 5)
    planner = engine_of(stores, BOTH).planner
    request = EngineRequest("b", ids, DEFAULT)
    tables = [list(range(1, 20)), [0] * 12 + list(range(20, 24)), [0] * 12 + list(range(24, 28)), [0, 0, 0, 28]]
    tried = list[int]()
    while (external := planner.match(request, 0)) and len(tried) < 5:
        tried.append(external)
        planner.promise("b", external, tables)
        plan = planner.plan([], {}.__getitem__)
        planner.report(StepReport(loaded={load.key: max(0, len(load.blocks) - 1) for load in plan.loads}))
    assert tried == [256, 128]
    planner.promise("b", 0, tables)
    planner.plan([Scheduled("b", 0, 128, begins=True)], {"b": tables}.__getitem__)
    assert planner.finish("b") == Reuse(300, 0, 0, 256)


def test_a_point_without_a_valid_encoding_takes_the_place_of_none(stores: Stores) -> None:
    """Of the points after 64, 128, 192, 256, 320 and 384 tokens the last two have windows that 4 bits cannot hold."""
    ids, layout = prompt(400), WINDOWS.layout("q4h")
    engine = HybridEngine(stores.open("q4h", layout=layout), WINDOWS, budget=70)
    request = HybridRequest("a", list(ids), 5)
    engine.add(request)
    for bad in (None, None, None, 275, 345):
        engine.step()
        if bad is not None:
            engine.workers[0].attention[2].cache[request.tables[1][bad // 16], :, bad % 16] = float("nan")
    engine.drain()
    assert ended([sorted(block.parts) for block in records_of(engine.owner, ids)]) == {0, 1, 2, 3}
    engine = HybridEngine(stores.open("q4h", layout=layout), WINDOWS)
    engine.serve("b", ids)
    assert engine.reuse["b"] == Reuse(400, 0, 256, 0)


@pytest.mark.parametrize(("paused", "reused"), [(3, 384), (20, 256)])
def test_what_passes_during_a_pause_takes_the_place_of_no_point(stores: Stores, paused: int, reused: int) -> None:
    """Nothing is saved for some steps; after the long pause the window of the last point is not there any more."""
    ids = prompt(394)
    engine = engine_of(stores, WINDOWS, budget=64)
    engine.add(HybridRequest("a", list(ids), 30))
    for _ in range(4):
        engine.step()
    engine.planner.report(StepReport(stalled_s=paused / PAUSE))
    engine.drain()
    parts = check_parts(engine.owner, WINDOWS, ids + engine.replies["a"])
    assert len(parts) == 6 and ended(parts) == {0, 1, 2, reused // 64 - 1}
    engine = engine_of(stores, WINDOWS)
    assert engine.serve("b", ids, 30) == reply_of(ids, 30) and engine.reuse["b"] == Reuse(394, 0, reused, 0)


def test_a_window_that_the_store_had_no_room_for_is_offered_again(stores: Stores) -> None:
    planner = engine_of(stores, WINDOWS).planner
    planner.match(EngineRequest("a", prompt(150), DEFAULT), 0)
    tables = {"a": [list(range(10 * group + 1, 10 * group + 11)) for group in range(3)]}.__getitem__
    full, window = planner.plan([Scheduled("a", 0, 150, begins=True)], tables).saves
    assert (full.part, len(full.blocks), window.part, len(window.blocks)) == (0, 2, 1, 1)
    planner.report(StepReport(saved={full.key: 2, window.key: 0}))
    (again,) = planner.plan([Scheduled("a", 150, 1)], tables).saves
    assert again.part == 1 and again.blocks == window.blocks
    planner.report(StepReport(saved={again.key: 1}))
    assert not planner.plan([Scheduled("a", 151, 1)], tables).saves
    planner.check()


@pytest.mark.parametrize("name", KINDS)
def test_a_turn_that_ends_leaves_the_points_of_running_requests(stores: Stores, name: str) -> None:
    """Both have the first 200 tokens; the one that ends first needs no windows and states in them."""
    kind, shared = KINDS[name], prompt(200)
    engine = engine_of(stores, kind, budget=256)
    first, second = HybridRequest("a", shared + prompt(20, 8), 30), HybridRequest("b", shared + prompt(200, 9), 3)
    engine.add(first)
    engine.step()
    engine.add(second)
    while second in [*engine.waiting, *engine.running]:
        engine.step()
    assert first in engine.running
    engine.drain()
    engine = engine_of(stores, kind)
    ids = first.ids[:220]
    assert engine.serve("c", ids, 3) == reply_of(ids, 3) and engine.reuse["c"] == Reuse(220, 0, 192, 0)


@pytest.mark.parametrize("name", KINDS)
def test_where_a_conversation_began_among_hot_blocks_is_a_point_of_its_own(stores: Stores, name: str) -> None:
    """Eve's prompt is Ada's, and so is its last point; Ada goes on and keeps others."""
    kind, ids = KINDS[name], prompt(220)
    engine = engine_of(stores, kind, budget=64)
    for turn, length in enumerate((100, 170, 220)):
        engine.serve(f"ada {turn}", ids[:length], agent="ada")
    engine.serve("eve", ids, 130, agent="eve")
    assert engine.reuse["eve"].hot >= 192
    engine.serve("ada", [*ids, *prompt(200, 1)], agent="ada")
    engine = engine_of(stores, kind)
    assert engine.serve("eve", ids, 60) == reply_of(ids, 60) and engine.reuse["eve"] == Reuse(220, 0, 192, 0)
