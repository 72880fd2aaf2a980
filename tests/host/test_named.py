"""The models of a file or a folder, the settings of their processes, and which one a request is for."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle.config import ServerSettings, Settings
from rekindle.errors import ConfigError, NotFound, RekindleError
from rekindle.server.gate.keys import Access
from rekindle_models.child import Keys
from rekindle_models.cli import label_of
from rekindle_models.named import Models, text_of
from rekindle_models.stored import answers_key
from rekindle_models.wishes import STATE, Wish, is_passed_on, starts_nothing, wish_of
from tests.test_cli import run

FILE = """
threads = 3
port = 8123
keep_alive = "8h"
[api_keys]
team = "their-key"
[models.small]
model = "pocket"
keep_alive = -1
threads = 2
[models."qwen:7b"]
model = "owner/name:Q4_K_M"
backend = "llama.cpp"
backend_flags = "-t 1"
"""


def models(folder: Path, text: str = FILE, **flags: Any) -> tuple[Settings, Models]:
    path = folder / "models.toml"
    path.write_text(text)
    settings = Settings.load({"models": str(path), "store": str(folder / "store"), **flags})
    return settings, Models.read(settings)


def test_a_table_wins_over_what_all_have_and_flags_over_the_top_of_the_file(tmp_path: Path) -> None:
    settings, found = models(tmp_path, hot_bytes="64MiB", port="9000")
    small, qwen = found.all
    assert settings.server.port == 9000 and settings.server.api_keys == {"team": "their-key"}
    assert small.given["threads"] == 2 and qwen.given["threads"] == 3
    assert small.given["hot_bytes"] == qwen.given["hot_bytes"] == 64 << 20
    assert (small.keep_alive_s, qwen.keep_alive_s) == (math.inf, 8 * 3600)
    assert small.given["store"] == str(tmp_path / "store" / "models" / "small")
    assert not {"port", "api_keys", "keep_alive", "models"} & (small.given.keys() | qwen.given.keys())
    variables = {f"REKINDLE_{name.upper()}": text_of(value) for name, value in qwen.given.items()}
    as_read = Settings.load({}, variables)
    assert as_read.backend.flags == "-t 1" and as_read.cache.hot_bytes == 64 << 20 and as_read.model.threads == 3


def test_a_folder_has_a_model_of_each_file_and_of_each_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint" / "config.json").write_text("{}")
    (folder / "a file (1).gguf").write_bytes(b"GGUF")
    (folder / "notes.txt").write_text("")
    found = Models.read(Settings.load({"models": str(folder), "store": "off", "threads": 2}))
    assert [model.name for model in found.all] == ["a-file-1-", "checkpoint"]
    assert all(model.given["store"] == "off" and model.given["threads"] == 2 for model in found.all)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("threads = 1", "needs a table for each model"),
        ("[models]", "needs a table for each model"),
        ("models = 3", "needs a table for each model"),
        ("[models.a]\nport = 1", "a: port is for all models"),
        ("[models.a]\nthread = 1", "a: .*did you mean threads"),
        ("[models.a]\nmodel = './nothing.gguf'", "a: ./nothing.gguf: there is no such"),
        ("[models.a]\nmodel = 'bundled'", "a: bundled is the name of no model: that of the bundled one is pocket"),
        ("[models.a]\nkeep_alive = 'soon'", "a: .*'soon' is not a duration"),
        ("[models.default]", "a name has letters"),
        ("[models.'a b']", "a name has letters"),
        ("[models.pocket]\n[models.Pocket]", "are one name"),
        ("[models.a]\n[models.a.b]", "a: .*unknown setting 'b'"),
        ("record = 'x'\n[models.pocket]", "record: with models each has its own"),
        ("ports = 1\n[models.pocket]", "models file: unknown setting 'ports'"),
    ],
)
def test_refusals_name_the_model_and_the_setting(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(RekindleError, match=named):
        models(tmp_path, text)


def test_what_is_neither_file_nor_folder_is_refused(tmp_path: Path) -> None:
    for path, named in ((tmp_path / "none", "is no file and no folder"), (tmp_path, "has no GGUF file")):
        with pytest.raises(ConfigError, match=named):
            Models.read(Settings.load({"models": str(path)}))


def wish(
    found: Models, path: str, body: bytes = b"", *, method: str = "POST", prefix: str | None = None, **headers: str
) -> Wish:
    state = {} if prefix is None else {STATE: prefix}
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw, "state": state}
    return wish_of(scope, body, found)


def test_a_request_names_its_model_in_path_header_or_body(tmp_path: Path) -> None:
    _, found = models(tmp_path)
    chat = "/v1/chat/completions"
    for body, name in (
        (b'{"model": "QWEN:7b"}', "qwen:7b"),
        (b'{"model": "owner/name:q4_k_m"}', "qwen:7b"),
        (b'{"model": "small:latest"}', "small"),
        (b'{"model": "default"}', "small"),
        (b"{}", "small"),
        (b"", "small"),
    ):
        assert wish(found, chat, body).model.name == name
    assert wish(found, "/v1/agents", method="GET", x_rekindle_model="qwen:7b").model.name == "qwen:7b"
    assert wish(found, chat, b'{"model": "small"}', prefix="qwen:7b").model.name == "qwen:7b"
    assert wish(found, "/v1/messages", b'{"model": "claude-opus-4"}').model.name == "small"
    assert wish(found, "/api/show", b'{"name": "qwen:7b"}').model.name == "qwen:7b"
    with pytest.raises(NotFound, match="model 'claude-opus-4' is not served here; 'small', 'qwen:7b' are"):
        wish(found, chat, b'{"model": "claude-opus-4"}')
    with pytest.raises(NotFound, match=r'model "x" not found, try pulling it first .*small:latest, qwen:7b'):
        wish(found, "/api/chat", b'{"model": "x"}')
    for bad, named in ((b'{"model": 3}', "model: must be a text"), (b"{", "not JSON")):
        with pytest.raises(RekindleError, match=named):
            wish(found, chat, bad)


@pytest.mark.parametrize(
    ("path", "body", "keep_alive", "is_empty"),
    [
        ("/api/generate", b'{"keep_alive": 0}', 0, True),
        ("/api/chat", b'{"messages": [], "keep_alive": "5m"}', 300, True),
        ("/api/chat", b'{"messages": [{"role": "user"}], "keep_alive": "-1"}', -1, False),
        ("/api/generate", b'{"prompt": "a", "keep_alive": -1}', -1, False),
        ("/v1/completions", b'{"keep_alive": 0}', None, False),
    ],
)
def test_a_request_of_ollama_says_how_long_its_model_stays(
    tmp_path: Path, path: str, body: bytes, keep_alive: float | None, is_empty: bool
) -> None:
    _, found = models(tmp_path)
    wanted = wish(found, path, body)
    assert (wanted.keep_alive, wanted.is_empty) == (keep_alive, is_empty)


def test_what_only_watches_starts_nothing_and_what_no_server_has_is_not_passed_on() -> None:
    def scope(path: str, method: str = "GET", **state: str) -> dict[str, Any]:
        raw = path.encode()
        return {"type": "http", "method": method, "path": path, "raw_path": raw, "headers": [], "state": state}

    watched = ("/overview", "/health/ready", "/v1/coordination/sessions/ab/events")
    assert all(starts_nothing(scope(path)) for path in watched) and not starts_nothing(scope(watched[2], "POST"))
    assert not any(starts_nothing(scope(path)) for path in ("/v1/agents", "/v1/coordination/sessions/ab"))
    assert is_passed_on(scope("/v1/agents/ada/why")) and is_passed_on(scope("/favicon.ico", rekindle_model="a"))
    assert not any(is_passed_on(scope(path)) for path in ("/favicon.ico", "/v1/models", "/api/ps", "/v1/agentsx", "/"))
    for target in ("@127.0.0.1:80/x", ".example.org/", "*", "x"):  # would name another host after a process's address
        assert not is_passed_on(scope(target, rekindle_model="a")), target


@pytest.mark.parametrize(
    ("keys", "access", "is_admin"),
    [
        ({}, Access(is_admin=True), False),
        ({"admin_key": "root"}, Access(is_admin=True), True),
        ({"admin_key": "root"}, Access(), False),
        ({"api_keys": {"team": "x"}}, Access("team"), False),
    ],
)
def test_processes_have_keys_of_their_own_that_grant_what_a_request_was_granted(
    keys: dict[str, Any], access: Access, is_admin: bool
) -> None:
    settings = ServerSettings(**keys)
    made = Keys.made_for(settings, None)
    key = made.key_for(access)
    assert key == (made.admin if is_admin else made.of[access.namespace])
    assert made.key_for(Access(has_key=False)) is None
    inner = ServerSettings(**made.settings)
    assert inner.namespaces() == settings.namespaces() and not {"root", "x"} & set(made.of.values())


def test_answers_have_one_key_that_lasts_as_long_as_a_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, found = models(tmp_path)
    first = answers_key(found.stores)
    secret = tmp_path / "store" / "models" / "small" / "secret"
    assert first is not None and len(first) == 64 and first == answers_key(found.stores)
    assert secret.read_bytes().hex() != first, "nobody who has it can read the store"
    _, without = models(tmp_path, store="off")
    assert len({first, answers_key(without.stores), answers_key(without.stores)}) == 3
    _, given = models(tmp_path, store="off", secret="the same for replicas")
    assert answers_key(given.stores) == answers_key(given.stores)
    assert not caplog.messages
    secret.write_bytes(b"cut")
    assert answers_key(found.stores) is None and str(secret.parent) in caplog.text


def test_commands_say_what_they_need(tmp_path: Path) -> None:
    refused = run("serve", "--max-loaded", "2")
    assert refused.exit_code == 2 and "set models" in refused.output
    assert "is here" in run("pull", "pocket").output
    missing = run("pull", "owner/never-was", HF_HUB_OFFLINE="1")
    assert missing.exit_code == 4 and "the hub cannot be reached (offline?)" in missing.output
    unreachable = run("ps", "--url", "http://127.0.0.1:9")
    assert unreachable.exit_code == 1 and "no server answers" in unreachable.output


def test_a_gguf_file_is_named_by_its_type() -> None:
    names = ("Qwen3-8B-Q4_K_M.gguf", "gemma.f16.gguf", "sub/mini-IQ2_XXS.GGUF", "odd.gguf")
    assert [label_of(name) for name in names] == ["Q4_K_M", "f16", "IQ2_XXS", "odd"]


def test_a_server_of_several_models_imports_nothing_that_computes() -> None:
    """What it shares with the server of one model: routes of that would bring the engine along, and torch."""
    code = "import sys, rekindle_models.app; assert not {'torch', 'rekindle.engine.api'} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
