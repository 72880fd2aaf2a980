"""Slot files are read as llama-server means them, written as it writes them, and refused whatever else they are."""

from __future__ import annotations

import os
import struct
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle_backends.llama.sections import Kind, SlotFileError
from rekindle_backends.llama.shapes import AttentionShape, FileShape, RecurrentShape, RowShape
from rekindle_backends.llama.slot_file import RowsToWrite, SlotFile, write
from tests.backends.llama.slot_files import Example, Tensor, examples, full

FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


def parsed(data: bytes, shape: FileShape | None = None) -> SlotFile:
    return SlotFile.parse(np.frombuffer(data, np.uint8), shape=shape)


def shape_of(example: Example) -> FileShape:
    def rows(tensors: tuple[Tensor, ...], is_transposed: bool) -> tuple[RowShape, ...]:
        return tuple(RowShape(each.type, each.row, each.element * is_transposed) for each in tensors)

    return FileShape(
        4,
        example.num_streams,
        tuple(
            AttentionShape(
                own.has_extra, own.is_transposed, *own.rotations, rows(own.k, False), rows(own.v, own.is_transposed)
            )
            for own in example.memories
        ),
        RecurrentShape(len(example.states), rows(example.states, False)) if example.states else None,
    )


def as_written(file: SlotFile) -> list[RowsToWrite]:
    """The memories of a file, to be written again."""

    def of(index: int) -> RowsToWrite:
        own = file.attention[index]
        return RowsToWrite(own.positions, lambda layer, kind: file.rows(index, layer, kind), own.extra)

    return [of(index) for index in range(len(file.attention))]


@FILES
@given(examples(max_tokens=40))
def test_every_row_is_found_and_the_file_written_again_is_the_same(tmp_path: Path, example: Example) -> None:
    path = tmp_path / "slot.bin"
    path.write_bytes(bytes(example))
    file = SlotFile.open(path, shape=shape_of(example))
    assert file.slot == (example.slot if example.memories else -1), "a state names no slot"
    assert file.tokens.tolist() == list(example.tokens)
    for index, memory in enumerate(example.memories):
        found = file.attention[index]
        assert found.positions.tolist() == list(memory.positions)
        assert (found.extra is not None) == memory.has_extra
        if found.extra is not None:
            assert [bytes(each) for each in found.extra] == [example.row(index, 0, "x", at) for at in memory.positions]
        kinds: list[tuple[Kind, tuple[Tensor, ...]]] = [("k", memory.k), ("v", memory.v)]
        for kind, tensors in kinds:
            for layer in range(len(tensors)):
                wanted = [example.row(index, layer, kind, at) for at in memory.positions]
                assert [bytes(each) for each in file.rows(index, layer, kind)] == wanted
                some = np.arange(len(wanted))[::-2]
                assert [bytes(each) for each in file.rows(index, layer, kind, some)] == wanted[::-2]
    assert [bytes(each) for each in file.states()] == [example.state(number) for number in range(len(example.states))]
    written, states = tmp_path / "written.bin", file.states()
    assert write(written, file.shape, example.slot, file.tokens, as_written(file), states) == len(bytes(example))
    assert written.read_bytes() == bytes(example)


@given(examples(max_tokens=12))
def test_a_shape_is_learned_from_a_file_that_can_be_read_in_one_way(example: Example) -> None:
    try:
        assert parsed(bytes(example)).shape == shape_of(example)
    except SlotFileError as error:
        assert "more than one way" in str(error)


@pytest.mark.parametrize("has_extra", [False, True])
@pytest.mark.parametrize("has_v", [False, True])
def test_usual_files_can_be_read_in_one_way(has_extra: bool, has_v: bool) -> None:
    memories = [full(8, has_extra=has_extra), full(8, has_extra=has_extra)]
    example = Example(tuple(each if has_v else replace(each, v=()) for each in memories), (7,) * 8)
    assert parsed(bytes(example)).shape == shape_of(example)


def test_a_file_that_can_be_read_in_two_ways_teaches_no_shape() -> None:
    """Its V can be taken for the state of a recurrent layer after a memory without V."""
    example = Example((replace(full(2, layers=1), v=(Tensor(1, 16, 2),)),), (7, 7))
    data = bytes(example)[:-32] + struct.pack("<IIiQ", 0, 1, 1, 12) + bytes(12)
    with pytest.raises(SlotFileError, match="more than one way"):
        parsed(data)
    assert parsed(data, shape_of(example)).shape == shape_of(example)


def test_files_of_another_shape_are_refused() -> None:
    example = Example((full(8), full(8)), (7,) * 8)
    shape = shape_of(example)
    cut = replace(example, memories=example.memories[:1])  # what a file is that ends with its first memory
    assert parsed(bytes(cut)).shape != shape
    for other in (cut, replace(example, num_streams=2), replace(example, memories=(full(8), full(8, layers=1)))):
        with pytest.raises(SlotFileError, match="shape"):
            parsed(bytes(other), shape)


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, 0x46554747, "not a slot file of llama-server: it begins with 0x46554747"),
        (4, 3, "a slot file of version 3, where only version 4 is known"),
        (12, 5, "not packed"),
        (16, 2, "not packed"),
        (24 + 4 * 5, 1, "pictures"),
    ],
)
def test_files_of_another_kind_are_named(at: int, value: int, said: str) -> None:
    data = bytearray(bytes(Example((full(5),), (7,) * 5)))
    struct.pack_into("<I", data, at, value)
    with pytest.raises(SlotFileError, match=said):
        parsed(bytes(data))


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(SlotFileError, match="empty"):
        SlotFile.open(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        SlotFile.open(tmp_path / "none")
    of_nothing = bytes(Example((full(0, layers=0),), ()))
    with pytest.raises(SlotFileError, match="the slot is empty"):
        parsed(of_nothing)


def test_only_files_are_read_and_written(tmp_path: Path) -> None:
    """Whoever else can write in the folder makes us wait for nobody, and neither read nor write elsewhere."""
    (tmp_path / "outside").write_bytes(bytes(SMALL))
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, says in (("link", "symbolic link"), ("folder", "directory"), ("pipe", "no file")):
        with pytest.raises((SlotFileError, OSError), match=says):
            SlotFile.open(tmp_path / name)
    file = SlotFile.open(tmp_path / "outside")
    for name in ("link", "folder", "pipe"):
        with pytest.raises(OSError):
            write(tmp_path / name, file.shape, SMALL.slot, file.tokens, as_written(file))
    assert (tmp_path / "outside").read_bytes() == bytes(SMALL)
    os.truncate(tmp_path / "outside", 1 << 40)  # which takes no room
    with pytest.raises(SlotFileError):
        SlotFile.open(tmp_path / "outside")


SMALL = Example((full(4, order=(1, 2, 3, 0)), full(4, order=(3, 2), layers=1)), (9, 8, 7, 6), 1, 2)
TURNED = Example((full(3, is_transposed=True, has_extra=True),), (1, 2, 3))
HYBRID = Example((full(3, has_extra=True),), (1, 2, 3), 1, 2, states=(Tensor(0, 12), Tensor(0, 8)))


def read_all(data: bytes, shape: FileShape | None = None) -> None:
    """Parse and read every row: SlotFileError, or no error; memory of no more than the file.

    Threads that other tests have left allocate memory, too, but not each time.
    """
    most = 64_000 + len(data)
    for _ in range(3):
        if (peak := allocated(data, shape)) < most:
            return
    raise AssertionError(f"{peak:,} bytes were allocated for a file of {len(data):,}")


def allocated(data: bytes, shape: FileShape | None) -> int:
    """Parse and read every row; return the most bytes that were allocated at once."""
    bytes_of_file = np.frombuffer(data, np.uint8)
    tracemalloc.start()
    try:
        file = SlotFile.parse(bytes_of_file, shape=shape)
        for index, section in enumerate(file.shape.attention):
            for layer in range(len(section.k)):
                file.rows(index, layer, "k")
            for layer in range(len(section.v)):
                file.rows(index, layer, "v")
        file.states()
    except SlotFileError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("example", [SMALL, TURNED, HYBRID, replace(HYBRID, memories=(), num_streams=1)])
def test_files_cut_anywhere_are_refused(example: Example) -> None:
    whole, shape = bytes(example), shape_of(example)
    for end in range(1, len(whole)):
        read_all(whole[:end])
        with pytest.raises(SlotFileError):
            parsed(whole[:end], shape)
    with pytest.raises(SlotFileError):
        parsed(whole + b"\0", shape)


@pytest.mark.parametrize("example", [SMALL, TURNED, HYBRID, replace(HYBRID, memories=(), num_streams=1)])
def test_no_damage_leads_out_of_the_file(example: Example) -> None:
    whole = bytes(example)
    for at in range(len(whole)):
        for flip in (0x01, 0x80, 0xFF):
            read_all(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
    for at in range(0, len(whole) - 4, 4):
        for count in (0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1):
            read_all(whole[:at] + struct.pack("<I", count) + whole[at + 4 :])


@settings(max_examples=300)
@given(examples(max_tokens=8), st.data())
def test_no_random_damage_leads_out_of_the_file(example: Example, data: st.DataObject) -> None:
    damaged = bytearray(bytes(example))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    read_all(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]) or b"\0")


SHAPE = FileShape(4, 3, (AttentionShape(False, False, 64, 64, (RowShape(8, 204),), (RowShape(8, 204),)),))


def test_an_identity_covers_all_but_the_slots() -> None:
    assert replace(SHAPE, num_streams=1).identity == SHAPE.identity
    own = SHAPE.attention[0]
    row = own.k[0]
    others = [replace(own, has_extra=True), replace(own, is_transposed=True), replace(own, v=())]
    others += [replace(own, k_rotation=0), replace(own, v_rotation=0)]
    rows = [replace(row, ggml_type=2), replace(row, row_bytes=108), replace(row, element_bytes=2)]
    others += [replace(own, k=(each,)) for each in rows] + [replace(own, v=(each,)) for each in rows]
    shapes = [SHAPE, replace(SHAPE, version=5), replace(SHAPE, attention=(own, own))]
    shapes += [replace(SHAPE, recurrent=RecurrentShape(*each)) for each in ((2, (row,)), (1, (row,)), (2, (row, row)))]
    shapes += [replace(SHAPE, attention=(each,)) for each in others]
    assert len({each.identity for each in shapes}) == len(shapes)
    assert {each.name for each in fields(own)} == {"has_extra", "is_transposed", "k_rotation", "v_rotation", "k", "v"}


def test_a_file_that_cannot_be_written_to_its_end_is_removed(tmp_path: Path) -> None:
    file = parsed(bytes(Example((full(5),), (7,) * 5)))

    def failing(layer: int, kind: Kind) -> np.ndarray:
        raise OSError("no space left")

    given = [replace(each, rows=failing) for each in as_written(file)]
    with pytest.raises(OSError, match="no space"):
        write(tmp_path / "slot.bin", file.shape, 0, file.tokens, given)
    assert not list(tmp_path.iterdir())
