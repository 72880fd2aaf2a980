"""What a backend serves: which of its models is taken, and what is noticed when it changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rekindle.config.services import BackendSettings
from rekindle.errors import ConfigError
from rekindle_backends.client import Address, Backend
from rekindle_backends.served import Served, check_tokens
from tests.backends.foreign import foreign

WAIT_S = 60.0  # nothing here is timed; this bounds a failure
ADAPTER = {"id": "letters", "parent": "scripted"}
OTHER = {"id": "other", "max_model_len": 64}


@contextmanager
def client(url: str) -> Iterator[Backend]:
    backend = Backend(Address(url, None, 60.0))
    backend.start()
    try:
        yield backend
    finally:
        backend.stop()


def until(look: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if look():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("more", "wanted", "names", "found"),
    [
        ([ADAPTER], None, (), "scripted"),
        ([ADAPTER], "letters", (), "letters"),
        ([OTHER], None, ("scripted",), "scripted"),
        ([{"id": "short", "root": "org/model"}], None, ("org/model",), "short"),
    ],
)
def test_the_model_that_is_meant(
    more: list[dict[str, Any]], wanted: str | None, names: tuple[str, ...], found: str
) -> None:
    with foreign(more=more) as state, client(state.url) as backend:
        assert Served.find(backend, wanted, names).name == found


def test_of_several_models_one_has_to_be_named() -> None:
    with (
        foreign(more=[OTHER]) as state,
        client(state.url) as backend,
        pytest.raises(ConfigError, match="set backend_model to one of scripted, other"),
    ):
        Served.find(backend, None, ("model",))


def test_a_prompt_that_the_backend_changes() -> None:
    with (
        foreign(prompt_token_ids=[1, 2]) as state,
        client(state.url) as backend,
        pytest.raises(ConfigError, match="changed the token ids of a prompt"),
    ):
        check_tokens(backend, Served("scripted", None), lambda text: [2])


def test_what_changes_later_is_noticed() -> None:
    with foreign() as state, client(state.url) as backend:
        served = Served.find(backend, None, ())
        backend.watch(served.difference, every_s=0.01)
        state.max_model_len = 1024
        assert until(lambda: "its context was 2048 tokens and is 1024" in (backend.problem() or ""))
        state.model = "renamed"
        assert until(lambda: "it no longer serves 'scripted'" in (backend.problem() or ""))
        state.model, state.max_model_len = "scripted", 2048
        assert until(lambda: backend.problem() is None)


def test_another_model_of_the_same_name_is_noticed() -> None:
    with foreign(props={"total_slots": 1}) as state, client(state.url) as backend:
        served = Served.find(backend, None, ())
        assert served.max_context == 2048
        backend.watch(served.difference, every_s=0.01)
        state.num_bytes += 1
        assert until(lambda: "it serves another model of the name 'scripted'" in (backend.problem() or ""))


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("vllm=http://h:8000", "http://h:8000"),
        ("vllm=http://h:8000/v1/", "http://h:8000"),
        ("openai=https://h/api/v1", "https://h/api"),
        ("llama.cpp=http://h:8080/", "http://h:8080"),
    ],
)
def test_where_a_backend_is(address: str, url: str) -> None:
    settings = BackendSettings(address=address)
    assert settings.url == url and settings.kind == address.partition("=")[0] and not settings.is_own


def test_an_address_may_hold_no_key() -> None:
    with pytest.raises(ConfigError, match="may hold no key: set backend_key"):
        BackendSettings(address="vllm=http://user:key@host")
