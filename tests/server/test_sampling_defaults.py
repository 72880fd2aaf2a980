"""A model whose makers say how it is sampled: every route does so, and a request has its own way.

The makers say `top_k` 1 here, which gives the same reply each time, and the model draws another one each time without.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rekindle.cli.chat import EngineTalker, chat_loop
from tests.backends.conftest import fronting
from tests.server.conftest import Served
from tests.server.scripted import serving
from tests.sessions.http.coordinating import create
from tests.tiny_models import tiny_model_dir

SAID = [{"role": "user", "content": "What did she say about the weather?"}]
NUM_TOKENS = 12
LIMITS = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, **LIMITS},
    "/v1/completions": {"prompt": "The lighthouse", **LIMITS},
    "/v1/responses": {"input": "What did she say?", "max_output_tokens": NUM_TOKENS, "ignore_eos": True},
    "/v1/messages": {"messages": SAID, "max_tokens": NUM_TOKENS},
    "/api/chat": {"messages": SAID, "stream": False, "options": {"num_predict": NUM_TOKENS}},
    "/api/generate": {"prompt": "The lighthouse", "stream": False, "options": {"num_predict": NUM_TOKENS}},
}


def model_with(makers: dict[str, Any], folder: Path) -> Path:
    directory = tiny_model_dir("llama", "fp32", folder)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **makers}), "utf-8")
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with({"top_k": 1}, tmp_path_factory.mktemp("greedy"))


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with serving(model=str(model), store="off", threads=1, hot_bytes="16MiB") as running:
        yield running


def reply(served: Served, path: str, **more: Any) -> str:
    """The ids of a reply, or its text where there are no ids."""
    answer = served.send("POST", path, {**BODIES[path], **more}).json
    for said in ("choices", "output", "content", "message", "response"):
        if said in answer:
            return json.dumps(
                [_text(part) for part in answer[said]] if isinstance(answer[said], list) else answer[said]
            )
    raise AssertionError(answer)


def _text(part: Any) -> Any:
    """What was said in a part, without its id."""
    return [part.get(name) for name in ("text", "message")] + [each.get("text") for each in part.get("content") or []]


@pytest.mark.parametrize("path", BODIES)
def test_every_route_samples_as_the_makers_say(path: str, served: Served) -> None:
    assert len({reply(served, path) for _ in range(3)}) == 1


@pytest.mark.parametrize("path", BODIES)
def test_a_request_has_its_own_way(path: str, served: Served) -> None:
    options = {"options": {**BODIES[path].get("options", {}), "top_k": 0, "temperature": 2.0, "top_p": 1.0}}
    own = options if path.startswith("/api") else {"top_k": 0, "temperature": 2.0}
    assert len({reply(served, path, **own) for _ in range(3)}) > 1


def test_what_is_drawn_is_what_is_shown(tmp_path: Path) -> None:
    makers = {"temperature": 0.5, "top_p": 0.7, "repetition_penalty": 1.25}
    with serving(model=str(model_with(makers, tmp_path)), store="off", threads=1, hot_bytes="16MiB") as served:
        shown = served.send("POST", "/api/show", {"model": "default"}).json["parameters"].splitlines()
        assert sorted(shown) == ["repeat_penalty 1.25", "temperature 0.5", "top_k 40", "top_p 0.7"]
        assert served.send("GET", "/overview").json["sampling"] == {**makers, "top_k": 40, "min_p": 0.05}
        echo = served.send("POST", "/v1/responses", BODIES["/v1/responses"]).json
        assert (echo["temperature"], echo["top_p"]) == (0.5, 0.7)
        assert any("temperature 0.5, top_p 0.7, repetition_penalty 1.25" in note for note in served.engine.notes)


def test_openais_habits_when_the_server_is_asked_for_them(model: Path) -> None:
    with serving(model=str(model), store="off", threads=1, hot_bytes="16MiB", sampling="openai") as served:
        assert len({reply(served, "/v1/chat/completions") for _ in range(3)}) > 1
        assert len({reply(served, "/api/chat") for _ in range(3)}) > 1


def test_python_does_the_same(served: Served) -> None:
    engine, limits = served.engine, {"max_tokens": NUM_TOKENS}
    ada = engine.agent("ada")
    for ask in (
        lambda: engine.chat(None, SAID, **limits),
        lambda: ada.chat(SAID, **limits),
        lambda: engine.generate("The", **limits),
        lambda: ada.generate("The", **limits),
    ):
        assert len({ask().token_ids for _ in range(3)}) == 1
    own = {**limits, "top_k": 0, "temperature": 2.0}
    assert len({engine.chat(None, SAID, **own).token_ids for _ in range(3)}) > 1


def test_sessions_do_the_same(served: Served) -> None:
    spoken = set()
    for _ in range(3):
        session = create(served, "Ann", "Bo", setting="A quiet room.", sampling={"max_tokens": NUM_TOKENS})
        session.run("/turn")
        spoken.add(json.dumps(session.texts()))
    assert len(spoken) == 1


def test_the_terminal_does_the_same(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = set()
    for number in range(3):
        lines, shown = iter(["What did she say?", "/quit"]), io.StringIO()
        monkeypatch.setattr("builtins.input", lambda *_, lines=lines: next(lines))
        chat_loop(EngineTalker(served.engine, f"terminal-{number}"), Console(file=shown, width=100))
        heard.add(shown.getvalue().rsplit("\n", 2)[0])
    assert len(heard) == 1


def test_a_front_takes_them_from_the_models_directory(model: Path) -> None:
    with (
        serving(model=str(model), store="off", threads=1, hot_bytes="16MiB", sampling="openai") as backend,
        fronting(model, backend, "off") as front,
    ):
        assert len({reply(front, "/v1/chat/completions") for _ in range(3)}) == 1
        assert len({reply(backend, "/v1/chat/completions") for _ in range(3)}) > 1
