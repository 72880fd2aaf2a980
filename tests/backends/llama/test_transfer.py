"""Rows go from slot files into blocks and back: each token's own, as far as llama-server can go on from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.cache.blocks.windows import WindowSlots
from rekindle.errors import RekindleError
from rekindle.kv.arena import KVArena
from rekindle.store.files.records import RecordFormat
from rekindle_backends.llama.layout import Unsupported, layout_of, presence_section
from rekindle_backends.llama.sections import SlotFileError
from rekindle_backends.llama.shapes import AttentionShape, FileShape, RecurrentShape, RowShape
from rekindle_backends.llama.slot_file import SlotFile
from rekindle_backends.llama.snapshots import Snapshots
from rekindle_backends.llama.transfer import put, resumable, take
from tests.backends.llama.slot_files import Example, Tensor, examples, full
from tests.backends.llama.test_slot_file import parsed, shape_of

FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


def arena_of(shape: FileShape, window: int, num_blocks: int) -> tuple[KVArena, WindowSlots | None]:
    """An arena for files of a shape; the slots of its part that ends, if it has one."""
    layout = layout_of(shape, window)
    kinds = list(layout.ending.values())
    slots = [WindowSlots(kind, num_slots=num_blocks + 1, num_blocks=num_blocks) for kind in kinds]
    return KVArena(layout, num_blocks, "cpu", slots), slots[0] if slots else None


def of(example: Example) -> SlotFile:
    return parsed(bytes(example), shape_of(example))


@FILES
@given(examples(windows=(0,), states=(0,)), st.data())
def test_blocks_give_the_file_of_any_slot_and_any_beginning(
    tmp_path: Path, example: Example, data: st.DataObject
) -> None:
    file, total = of(example), len(example.tokens)
    arena, _ = arena_of(file.shape, 0, 8)
    blocks = data.draw(st.permutations(range(8)))
    middle = data.draw(st.integers(0, total))
    take(file, arena, blocks, 0, middle)
    assert resumable(arena, blocks, total) == middle
    take(file, arena, blocks, middle, total)
    arena.check()
    assert resumable(arena, blocks, total + 9) == total
    num_tokens, slot = data.draw(st.integers(1, total)), data.draw(st.integers(0, example.num_streams - 1))
    wanted = bytes(example.of(num_tokens, slot, tuple(range(num_tokens))))
    assert put(arena, blocks, num_tokens, file.tokens, file.shape, tmp_path / "slot.bin", slot) == len(wanted)
    assert (tmp_path / "slot.bin").read_bytes() == wanted


@FILES
@given(examples(windows=(1,), states=(0,)), st.integers(16, 150), st.data())
def test_a_window_has_its_rows_and_one_that_no_token_sees(
    tmp_path: Path, example: Example, window: int, data: st.DataObject
) -> None:
    file, total = of(example), len(example.tokens)
    arena, slots = arena_of(file.shape, window, 8)
    assert slots is not None
    blocks = data.draw(st.permutations(range(8)))
    for index in range(data.draw(st.integers(0, 3)), 8):
        slots.take(blocks[index])
    take(file, arena, blocks, 0, total)
    there = {at for at in example.memories[1].positions if slots.has(blocks[at // 64])}
    can = [0] + [n for n in range(window + 1, total + 1) if there.issuperset(range(n - window, n))]
    assert resumable(arena, blocks, total) == can[-1]
    num_tokens = data.draw(st.sampled_from(can))
    if not num_tokens:
        with pytest.raises(ValueError, match="cannot go on"):
            put(arena, blocks, num_tokens, file.tokens, file.shape, tmp_path / "none.bin", 0)
        return
    unseen = num_tokens - window - 1
    kept = tuple(range(unseen, num_tokens))
    wanted = example.of(num_tokens, 0, tuple(range(num_tokens)), kept, zeros=frozenset({unseen}))
    put(arena, blocks, num_tokens, file.tokens, file.shape, tmp_path / "slot.bin", 0)
    assert (tmp_path / "slot.bin").read_bytes() == bytes(wanted)


@given(st.integers(16, 100), st.integers(0, 250), st.data())
def test_what_can_be_resumed_is_what_has_its_rows(window: int, num_tokens: int, data: st.DataObject) -> None:
    """Against the definition: any rows present, also with gaps."""
    shape = shape_of(Example((full(3, layers=1), full(3, layers=1)), (0,) * 3))
    arena, slots = arena_of(shape, window, 4)
    assert slots is not None
    gaps = st.sets(st.integers(0, 255), max_size=3)
    missing = [data.draw(gaps), data.draw(gaps)]
    for block in data.draw(st.sets(st.integers(0, 3))):
        slots.take(block)
    for part in range(2):
        section = presence_section(arena.layout.parts[part])
        for at in sorted(set(range(256)) - missing[part]):
            if arena.has(part, at // 64):
                words = arena.parts[part][arena.row(part, at // 64)].numpy()[section.offset :][:256].view("<i4")
                words[at % 64] = at + 1
            else:
                missing[part].add(at)

    def can_go_on(end: int) -> bool:
        seen = set(range(max(0, end - window), end))
        return end == 0 or (end > window and not missing[0] & set(range(end)) and not missing[1] & seen)

    assert resumable(arena, range(4), num_tokens) == max(end for end in range(num_tokens + 1) if can_go_on(end))


@FILES
@given(examples(windows=(0,), states=(2,)), st.data())
def test_a_state_goes_on_from_its_own_token_with_the_rows_before_it(
    tmp_path: Path, example: Example, data: st.DataObject
) -> None:
    """Rows up to an earlier turn's end from the file of a later one, with the state of the earlier one's file."""
    total, cut = len(example.tokens), data.draw(st.integers(1, len(example.tokens) - 1))
    early = replace(example.of(cut, example.slot, *([tuple(range(cut))] * len(example.memories))))
    arena, slots = arena_of(of(early).shape, 0, 8)
    assert slots is not None
    blocks = data.draw(st.permutations(range(8)))
    last, end = (cut - 1) // 64, (total - 1) // 64
    with_state = data.draw(st.booleans())
    if with_state:
        assert slots.take(blocks[last])
    take(of(early), arena, blocks, 0, cut)
    assert resumable(arena, blocks, cut) == (cut if with_state else 0)
    take(of(example), arena, blocks, cut, total)
    assert resumable(arena, blocks, total) == (cut if with_state else 0), "the later state has no place, or another's"
    if with_state:
        assert resumable(arena, blocks, cut - 1) == 0, "a state cannot be cut back"
        put(arena, blocks, cut, of(example).tokens, of(early).shape, tmp_path / "slot.bin", early.slot)
        assert (tmp_path / "slot.bin").read_bytes() == bytes(early)
    if end != last and slots.take(blocks[end]):
        take(of(example), arena, blocks, total, total)
        assert resumable(arena, blocks, total) == total
        with pytest.raises(ValueError, match="cannot go on"):
            put(arena, blocks, total - 1, of(example).tokens, of(early).shape, tmp_path / "none.bin", 0)
    arena.check()


def test_a_state_that_is_not_after_the_last_token_is_not_taken() -> None:
    example = Example((full(70),), (5,) * 70, states=(Tensor(0, 12),))
    arena, slots = arena_of(shape_of(example), 0, 2)
    assert slots is not None and slots.take(1)
    for other in (replace(example, state_end=69), replace(example, state_end=71)):
        take(of(other), arena, [0, 1], 0, 70)
        assert resumable(arena, [0, 1], 70) == 0
    take(of(example), arena, [0, 1], 0, 69)  # what follows is another's text
    assert not Snapshots(arena).ends([0, 1])
    take(of(example), arena, [0, 1], 0, 70)
    assert resumable(arena, [0, 1], 70) == 70


def test_rows_of_a_window_that_a_file_lacks_stay() -> None:
    window, total = 20, 90
    early = Example((full(70), full(70, order=tuple(range(50, 70)))), (5,) * 70)
    late = Example((full(total), full(total, order=tuple(range(70, total)))), (5,) * total)
    arena, slots = arena_of(shape_of(early), window, 2)
    assert slots is not None and slots.take(0) and slots.take(1)
    take(of(early), arena, [0, 1], 0, 70)
    assert resumable(arena, [0, 1], 70) == 70 and resumable(arena, [0, 1], 69) == 0, "the row of token 49 is not there"
    before = arena.parts[1].clone()
    take(of(late), arena, [0, 1], 0, total)
    assert resumable(arena, [0, 1], 70) == 70 and resumable(arena, [0, 1], total) == total
    changed = (arena.parts[1] != before).nonzero()[:, 0].unique().tolist()
    assert changed == [arena.row(1, 1)], "only rows of the second block are new"


def test_conversations_share_the_blocks_of_their_beginning(tmp_path: Path) -> None:
    ada, bob = (Example((full(200),), (1,) * 200, seed=seed, shared=128) for seed in (1, 2))
    arena, _ = arena_of(shape_of(ada), 0, 8)
    take(of(ada), arena, [3, 1, 4, 5], 0, 200)
    take(of(bob), arena, [3, 1, 7, 0], 128, 200)
    for example, blocks in ((ada, [3, 1, 4, 5]), (bob, [3, 1, 7, 0])):
        put(arena, blocks, 200, of(example).tokens, shape_of(example), tmp_path / "slot.bin", 0)
        assert (tmp_path / "slot.bin").read_bytes() == bytes(example)


@pytest.mark.parametrize(
    "memories",
    [
        (full(5, order=(0, 1, 2, 3)),),
        (full(5, order=(0, 1, 2, 3, 3)),),
        (full(5, order=(1, 2, 3, 4, 5)),),
        (full(5), full(5, order=(3, 3))),
        (full(5), full(5, order=(4, 5))),
    ],
)
def test_files_without_each_token_once_are_refused(memories: tuple[object, ...]) -> None:
    example = replace(Example((), (1,) * 5), memories=memories)
    arena, slots = arena_of(shape_of(example), 16, 2)
    assert slots is None or slots.take(0)
    with pytest.raises(SlotFileError, match="not every one of its 5 tokens once"):
        take(of(example), arena, [0, 1], 0, 4)
    assert not any(part.any() for part in arena.parts)


def test_tokens_that_are_not_there_are_not_taken_or_put(tmp_path: Path) -> None:
    file = of(Example((full(100),), (1,) * 100))
    arena, _ = arena_of(file.shape, 0, 2)
    for first, end, blocks in ((0, 101, [0, 1]), (0, 65, [0]), (5, 4, [0]), (-1, 4, [0])):
        with pytest.raises(ValueError, match="of a file of 100"):
            take(file, arena, blocks, first, end)
    take(file, arena, [0, 1], 0, 70)
    with pytest.raises(ValueError, match="cannot go on from 71 tokens"):
        put(arena, [0, 1], 71, file.tokens, file.shape, tmp_path / "slot.bin", 0)
    with pytest.raises(ValueError, match="no slot 2 in a file of 2 streams"):
        put(arena, [0, 1], 70, file.tokens, replace(file.shape, num_streams=2), tmp_path / "slot.bin", 2)
    assert not list(tmp_path.iterdir())


ROW = RowShape(1, 384)
PLAIN = AttentionShape(False, False, 0, 0, (ROW, ROW), (ROW, ROW))


@pytest.mark.parametrize(
    ("shape", "window", "said"),
    [
        (FileShape(4, 1, (PLAIN, PLAIN), RecurrentShape(2, (ROW, ROW))), 512, "windows and recurrent layers"),
        (FileShape(4, 1, (replace(PLAIN, k=(), v=()), PLAIN)), 512, "all its layers have windows"),
        (FileShape(4, 1, (PLAIN, PLAIN)), None, "more of a token than"),
        (FileShape(4, 1, (PLAIN, PLAIN, PLAIN)), 512, "more of a token than"),
    ],
)
def test_models_whose_states_are_not_rows_are_refused(shape: FileShape, window: int | None, said: str) -> None:
    with pytest.raises(Unsupported, match=said) as refused:
        layout_of(shape, window)
    assert isinstance(refused.value, RekindleError)


def test_a_block_takes_the_rows_and_16_bytes_a_token() -> None:
    of_values_too = layout_of(FileShape(4, 1, (PLAIN, PLAIN)), 512)
    assert [part.payload_bytes for part in of_values_too.parts] == [64 * (PLAIN.row_bytes + 16)] * 2
    assert [part.kind.name for part in of_values_too.parts] == ["full", "window-512"]
    latent = replace(PLAIN, v=())
    assert layout_of(FileShape(4, 1, (latent,)), None).block_bytes == 64 * (latent.row_bytes + 16)
    RecordFormat.of(of_values_too, 1)


def test_a_state_is_a_part_of_its_own() -> None:
    recurrent = RecurrentShape(2, (ROW, ROW))
    for attention, token_bytes in (((PLAIN,), PLAIN.row_bytes + 16), ((), 16)):
        layout = layout_of(FileShape(4, 1, attention, recurrent), 512)
        assert [part.kind.name for part in layout.parts] == ["full", "turn-state"]
        assert [part.payload_bytes for part in layout.parts] == [64 * token_bytes, 64 + recurrent.num_bytes]
        RecordFormat.of(layout, 1)
