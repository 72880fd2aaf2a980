"""Which pieces of which blocks a record's parts are, and which records and points an engine can go on from."""

from __future__ import annotations

import numpy as np
import pytest

from rekindle.cache.blocks.hashing import BlockHash, BlockIdentity
from rekindle.parts import STATE as STATES
from rekindle.parts import WindowPart
from rekindle.store.values import Place, StoredBlock
from rekindle_vllm.groups import NULL, Group, Groups
from rekindle_vllm.names import Scope
from rekindle_vllm.points import ResumePoints
from rekindle_vllm.requests import EngineRequest, Scheduled, Tracked
from rekindle_vllm.settings import BridgeSettings
from rekindle_vllm.steps import ABSENT

FULL, WINDOW, STATE = Group(0, 16), Group(1, 16, WindowPart(100)), Group(2, 64, STATES)


def test_a_record_has_the_blocks_of_all_groups_of_its_part() -> None:
    groups = Groups([FULL, Group(0, 32), WINDOW, STATE], 64)
    tables = [list(range(1, 9)), list(range(11, 15)), [NULL] * 5 + [26, 27, 28], [NULL, 32]]
    assert groups.pieces(0, 0, tables) == (1, 2, 3, 4, 11, 12)
    assert groups.pieces(0, 1, tables) == (5, 6, 7, 8, 13, 14)
    assert groups.pieces(0, 2, tables) == (ABSENT,) * 6
    assert groups.pieces(1, 1, tables) == (ABSENT, 26, 27, 28)
    assert groups.pieces(2, 0, tables) == (ABSENT,) and groups.pieces(2, 1, tables) == (32,)
    assert [groups.columns(number) for number in range(4)] == [slice(0, 4), slice(4, 6), slice(0, 4), slice(0, 1)]


def test_only_pieces_within_the_given_tokens_are_there() -> None:
    groups = Groups([FULL, WINDOW, STATE], 64)
    tables = [list(range(1, 13)), list(range(21, 33)), [41, 42, 43]]
    assert groups.pieces(0, 1, tables, 80, 112) == (ABSENT, 6, 7, ABSENT)
    assert groups.pieces(2, 1, tables, 128) == (ABSENT,) and groups.pieces(2, 1, tables, 127, 128) == (42,)
    assert groups.pieces(2, 1, tables, 0, 127) == (ABSENT,)


@pytest.mark.parametrize(("tokens", "per_block", "resume"), [(128, 2, 128), (48, 3, 192), (64, 1, 64), (16, 1, 64)])
def test_pieces_are_the_largest_runs_within_a_block_and_a_record(tokens: int, per_block: int, resume: int) -> None:
    """Every token of four records is in one piece, and these are in its block."""
    groups = Groups([Group(0, tokens)], 64)
    assert groups.pieces_per_block(0) == per_block and groups.resume_tokens == resume
    table = [5 + 2 * number for number in range(-(-256 // tokens))]
    size = tokens // per_block
    found = [piece for record in range(4) for piece in groups.pieces(0, record, [table])]
    assert len(found) * size == 256
    for number, piece in enumerate(found):
        block, inside = divmod(piece, per_block)
        assert (block, inside * size) == (table[number * size // tokens], number * size % tokens)
    assert groups.columns(0) == slice(0, 64 // size)


def test_states_are_where_their_blocks_end() -> None:
    groups = Groups([Group(0, 16), Group(1, 128, STATES)], 64)
    table = [[*range(1, 17)], [7, 8]]
    assert [groups.pieces(1, record, table) for record in range(4)] == [(ABSENT,), (7,), (ABSENT,), (8,)]
    assert groups.resume_tokens == 128 and groups.state_groups == [1]


@pytest.mark.parametrize(
    ("block", "window", "records"),
    [(16, 64, range(3, 4)), (16, 65, range(3, 4)), (16, 66, range(2, 4)), (256, 66, range(4)), (16, 999, range(4))],
)
def test_of_windows_all_records_in_blocks_that_the_engine_keeps_are_needed(
    block: int, window: int, records: range
) -> None:
    groups = Groups([FULL, Group(1, block, WindowPart(window)), Group(2, 64, STATES)], 64)
    assert groups.needed(1, 256) == records
    assert groups.needed(0, 256) == range(4) and groups.needed(2, 256) == range(3, 4)


@pytest.mark.parametrize("window", [16, 48, 64, 100, 300])
@pytest.mark.parametrize("block", [16, 48, 64, 256, 528])
def test_a_store_keeps_the_records_that_a_point_needs(window: int, block: int) -> None:
    groups = Groups([FULL, Group(1, block, WindowPart(window)), Group(2, 64, STATES)], 64)
    for point in range(groups.resume_tokens, 5 * groups.resume_tokens, groups.resume_tokens):
        for part, kind in ((1, WindowPart(window)), (2, STATES)):
            kept = {record for at in groups.positions(point) for record in kind.kept_blocks(at, 64)}
            assert kept >= set(groups.needed(part, point))
        assert block > 64 or groups.positions(point) == {point + 1}


@pytest.mark.parametrize(
    ("block", "window", "record"),
    [
        (16, 512, 64),
        (16, 2047, 64),
        (32, 100, 64),
        (64, 128, 64),
        (16, 96, 32),
        (48, 64, 32),
        (16, 48, 16),
        (16, 100, 16),
    ],
)
def test_records_are_as_large_as_an_engine_holds_them_at_each_point_of_a_reply(
    block: int, window: int, record: int
) -> None:
    """Token by token, it gives a block back as soon as the next token does not read it."""
    settings = BridgeSettings(dir="/kv")
    assert settings.record_tokens([16, block], (), [(block, window)]) == record
    assert settings.record_tokens([16, block, 16], [96], [(block, window)]) == min(record, 32)
    for size, is_held in ((record, True), (2 * record, record == 64)):
        groups = Groups([Group(0, 16), Group(1, block, WindowPart(window))], size)
        point = -(-3000 // groups.resume_tokens) * groups.resume_tokens
        passed = (point - window) // block  # of the table in the step that computes the last token before the point
        tables = [range(1, 400), [NULL if number < passed else number + 1 for number in range(point // block)]]
        found = [piece for each in groups.needed(1, point) for piece in groups.pieces(1, each, tables)]
        assert (ABSENT not in found) or not is_held
        assert is_held or ABSENT in found


def test_records_of_windows_that_no_size_holds_are_as_large_as_without_them() -> None:
    assert BridgeSettings(dir="/kv").record_tokens([16, 24], (), [(24, 24)]) == 64
    assert BridgeSettings(dir="/kv", block_tokens=64).record_tokens([16, 16], (), [(16, 48)]) == 64


GROUPS = Groups([FULL, WINDOW, STATE], 64)
POINTS = ResumePoints(GROUPS)


def stored(*parts: str) -> list[StoredBlock]:
    """Records with these parts, each a string of their numbers."""
    name = BlockHash(b"n" * 32)
    identity = BlockIdentity(name, name, name, np.zeros(64, dtype=np.uint32))
    return [StoredBlock(identity, tuple(Place(int(part), 0, 0) for part in own)) for own in parts]


def test_the_last_point_has_all_parts_that_it_needs() -> None:
    found = stored("012", "01", "012", "01", "02")
    assert POINTS.last(0, found, 0) == 192
    assert POINTS.last(0, found[:2], 0) == 64 and POINTS.earliest(found) == 64
    assert POINTS.last(3, stored("01", "012"), 192) == 320  # of the window, records before the first are hot
    assert POINTS.last(3, stored("01", "01"), 192) == 192
    assert POINTS.last(0, stored("0", "012"), 0) == 0 and POINTS.earliest(stored("0", "012")) is None
    assert POINTS.last(1, stored("012"), 112) == 128 and POINTS.last(1, stored("012"), 128) == 128


def test_points_are_where_records_and_all_blocks_end() -> None:
    points = ResumePoints(Groups([Group(0, 48), Group(1, 16, WindowPart(64))], 64))
    assert points.last(0, stored(*["01"] * 5), 0) == 192 and points.last(0, stored(*["01"] * 2), 0) == 0


def tracked(prompt_tokens: int, since: int = 0, points: list[int] | None = None) -> Tracked:
    request = EngineRequest("a", [0] * prompt_tokens, Scope("default"))
    made = Tracked(request, BlockHash(b"r" * 32), 64)
    made.since, made.points = since, points or []
    return made


def test_states_give_points_where_they_are_kept() -> None:
    first = Scheduled("a", 0, 128)
    assert POINTS.reached(tracked(300), first, 128) == [128]  # the first one
    second = Scheduled("a", 128, 64)
    assert POINTS.reached(tracked(300, 128, [128]), second, 192) == []
    assert POINTS.reached(tracked(300, 128, [128]), Scheduled("a", 128, 128, states=[(2, 7, 256)]), 256) == [256]
    assert POINTS.reached(tracked(300, 256, [128, 256]), Scheduled("a", 256, 44), 300) == []
    assert POINTS.reached(tracked(300, 300, [128, 256]), Scheduled("a", 319, 1), 320) == [320]  # in a reply
    assert POINTS.reached(tracked(300, 320, [128, 256]), Scheduled("a", 320, 1), 320) == []


def test_windows_give_the_last_point_of_a_step() -> None:
    points = ResumePoints(Groups([FULL, WINDOW], 64))
    assert points.reached(tracked(300), Scheduled("a", 0, 210), 210) == [192]
    assert points.reached(tracked(300, 210), Scheduled("a", 210, 10), 220) == []
    assert ResumePoints(Groups([FULL], 64)).reached(tracked(300), Scheduled("a", 0, 210), 210) == []


def test_the_first_two_points_the_prompts_last_and_the_last_are_worth_keeping() -> None:
    assert POINTS.worth_keeping([64, 128, 192, 256, 320, 384], prompt_tokens=300) == {64, 128, 256, 384}
    assert POINTS.worth_keeping([64], prompt_tokens=300) == {64} and POINTS.worth_keeping([], 300) == set()
    assert POINTS.worth_keeping({384, 320, 448}, prompt_tokens=300) == {320, 384, 448}
