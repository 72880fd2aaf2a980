"""Sealed objects open under their own name and secret, unchanged, and under nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle_tier.sealing import OVERHEAD, BadObject, Sealer

ONE, OTHER = Sealer(b"a" * 32), Sealer(b"b" * 32)


@given(st.binary(max_size=200), st.text(max_size=20))
def test_what_is_sealed_opens_again(data: bytes, name: str) -> None:
    sealed = ONE.seal(name, data)
    assert len(sealed) == len(data) + OVERHEAD
    assert Sealer(b"a" * 32).open(name, sealed) == data, "replicas share the secret"


def test_equal_data_is_sealed_differently_each_time() -> None:
    assert ONE.seal("a", b"data") != ONE.seal("a", b"data")


@given(st.data())
def test_every_flipped_bit_is_found(draw: st.DataObject) -> None:
    sealed = bytearray(ONE.seal("name", b"some data of an object"))
    at = draw.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[at // 8] ^= 1 << at % 8
    with pytest.raises(BadObject):
        ONE.open("name", bytes(sealed))


@pytest.mark.parametrize("length", [0, 1, OVERHEAD - 1, OVERHEAD, OVERHEAD + 3])
def test_every_cut_is_found(length: int) -> None:
    with pytest.raises(BadObject):
        ONE.open("name", ONE.seal("name", b"data")[:length])


def test_another_name_or_secret_does_not_open_it() -> None:
    sealed = ONE.seal("name", b"data")
    with pytest.raises(BadObject, match="another name or with another secret"):
        ONE.open("other", sealed)
    with pytest.raises(BadObject, match="another secret"):
        OTHER.open("name", sealed)


def test_digests_tell_fields_and_secrets_apart() -> None:
    digests = [
        ONE.digest("a", "bc"),
        ONE.digest("ab", "c"),
        ONE.digest("abc"),
        ONE.digest("a", "b", "c"),
        OTHER.digest("a", "bc"),
    ]
    assert len(set(digests)) == len(digests)
    assert ONE.digest("a", "bc") == Sealer(b"a" * 32).digest("a", "bc")


def test_a_missing_package_is_named_with_its_extra() -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from rekindle.errors import ConfigError\n"
        "from rekindle_tier.sealing import Sealer\n"
        "try:\n    Sealer(b'a' * 32)\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'rekindle[tier]'" in run.stdout
