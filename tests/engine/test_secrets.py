"""The secret as a setting: equal names where it is equal, refused where the store has another, shown nowhere."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle.errors import StoreError
from rekindle.store.files.keys import derived_secret
from tests.proofs import proved
from tests.store.chains import open_store

SECRET = "seventeen letters"
MESSAGE = {"role": "user", "content": "What did she say about the number?"}


def made(model: Path, store: Path | str, **settings: Any) -> Engine:
    given = {"threads": 1, "hot_bytes": 4 << 20, "block_tokens": 16, "anticipate": "off", **settings}
    return proved(Engine(model=model, store=store, **given))


def root_of(engine: Engine) -> bytes:
    """The root of the names of blocks."""
    return engine.components.loop.call(lambda core: core.cache.root("default")).result()


def test_names_are_equal_where_the_secret_is(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    roots = []
    with caplog.at_level(logging.DEBUG):
        for more in ({"store": tmp_path / "a"}, {"store": tmp_path / "b", "slot": 3}, {"store": "off"}):
            with made(tiny_llama, **{"secret": SECRET, **more}) as engine:
                engine.chat("ada", [MESSAGE], temperature=0, max_tokens=2)
                roots.append(root_of(engine))
                shown = f"{engine!r} {engine.settings!r} {engine.stats()} {engine.health()} {engine.notes}"
                assert SECRET not in shown
        with made(tiny_llama, store=tmp_path / "c", secret=SECRET + "!") as engine:
            assert root_of(engine) != roots[0]
        with pytest.raises(StoreError, match="made with another secret") as caught:
            made(tiny_llama, store=tmp_path / "c", secret=SECRET)
    assert len(set(roots)) == 1
    assert SECRET not in str(caught.value) and SECRET not in caplog.text and SECRET not in "".join(capfd.readouterr())
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


def test_another_secret_is_refused_before_the_weights_are_loaded(tiny_llama: Path, tmp_path: Path) -> None:
    made(tiny_llama, tmp_path / "store").close()
    with pytest.raises(StoreError, match="made with another secret"):
        made(tmp_path / "no model", tmp_path / "store", secret=SECRET)


@pytest.mark.parametrize(("key", "other"), [("ab" * 32, None), ("ab" * 32, "cd" * 32), (None, "ab" * 32)])
def test_another_key_or_none_is_refused_before_the_weights_are_loaded(
    tiny_llama: Path, tmp_path: Path, key: str | None, other: str | None
) -> None:
    made(tiny_llama, tmp_path / "store", store_key=key).close()
    with pytest.raises(StoreError, match="nothing was changed"):
        made(tmp_path / "no model", tmp_path / "store", store_key=other)


def test_without_blocks_the_secret_is_made_too(tiny_llama: Path, tmp_path: Path) -> None:
    made(tiny_llama, tmp_path, secret=SECRET, reuse="off").close()
    with closing(open_store(tmp_path)) as store:  # as tools do, without the setting
        assert store.secret == derived_secret(SECRET)
    made(tiny_llama, tmp_path, secret=SECRET).close()
