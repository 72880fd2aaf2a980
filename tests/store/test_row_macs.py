"""MACs of rows: equal for equal rows alone, whatever their types, tables and secrets."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.store.row_macs import MAC_BYTES, TableMac, row_key

KEY = row_key(b"s" * 32, "index")
NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
FLOATS = st.floats(allow_nan=False).map(lambda value: value + 0.0)
ROWS = st.tuples(st.binary(max_size=5), NUMBERS, st.text(max_size=5), st.none() | st.text(max_size=5), FLOATS)
MAC = TableMac(KEY, "agent", "bitnf")


@given(ROWS, ROWS)
def test_rows_have_one_mac_only_if_they_are_equal(a: tuple[object, ...], b: tuple[object, ...]) -> None:
    assert len(MAC.of(a)) == MAC_BYTES
    assert (MAC.of(a) == MAC.of(b)) == (a == b)
    assert MAC.holds((*a, MAC.of(a))) and MAC.holds((*b, MAC.of(a))) == (a == b)


@given(st.lists(st.sampled_from([b"x", 1, 1.0, "x", None]), min_size=5, max_size=5))
def test_a_value_of_another_type_does_not_verify(row: list[object]) -> None:
    right = (b"x", 1, "x", None, 1.0)
    typed = [type(value) for value in row] == [bytes, int, str, type(None), float]
    assert MAC.holds((*row, MAC.of(right))) == typed


@pytest.mark.parametrize("mac", [b"", None, 5, "x", b"0" * MAC_BYTES])
def test_what_is_no_mac_does_not_verify(mac: object) -> None:
    assert not MAC.holds((b"x", 1, "x", None, 1.0, mac))


def test_bytes_that_move_between_columns_are_noticed() -> None:
    pair = TableMac(KEY, "pair", "bb")
    assert len({pair.of(row) for row in ((b"", b"ab"), (b"a", b"b"), (b"ab", b""))}) == 3
    assert MAC.of((b"", 0, "", None, 0.0)) != MAC.of((b"", 0, "", "", 0.0))


def test_tables_files_secrets_and_kinds_have_macs_of_their_own() -> None:
    others = [
        TableMac(KEY, "agents", "bi"),
        TableMac(KEY, "agent", "ib"),
        TableMac(row_key(b"s" * 32, "sessions"), "agent", "bi"),
        TableMac(row_key(b"t" * 32, "index"), "agent", "bi"),
    ]
    right = TableMac(KEY, "agent", "bi").of((b"x", 1))
    assert all(other.of((b"x", 1) if other is not others[1] else (1, b"x")) != right for other in others)


@pytest.mark.parametrize("row", [(b"x", 1 << 63), (b"x", 0.5), ("x", 1), (None, 1)])
def test_a_row_that_cannot_be_written_has_no_mac(row: tuple[object, ...]) -> None:
    with pytest.raises((TypeError, ValueError, struct.error)):
        TableMac(KEY, "agent", "bi").of(row)
