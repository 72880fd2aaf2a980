"""Settings: precedence, sizes, and refusals that say what to do."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle.config import (
    SETTINGS,
    CacheSettings,
    EngineSettings,
    ModelSettings,
    PromptSettings,
    ServerSettings,
    Settings,
    StoreSettings,
    parse_size,
)
from rekindle.errors import ConfigError
from rekindle.harness.client import flags_of, variables


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "rekindle.toml"
    path.write_text('port = 1\nkv = "bf16"\nhot_bytes = "2GiB"\nmax_stall_s = 0.5\n')
    env = {"REKINDLE_PORT": "2", "REKINDLE_KV": "q4h", "PATH": "/bin"}
    settings = Settings.load({"port": 3, "kv": None}, env, path)
    assert settings.server.port == 3
    assert settings.model.kv == "q4h"
    assert settings.cache.hot_bytes == 2 << 30
    assert settings.engine.max_stall_s == 0.5
    assert settings.cache.block_tokens == 64


def test_a_command_may_have_defaults_of_its_own() -> None:
    assert Settings.load({}, {}, defaults={"port": 0}).server.port == 0
    assert Settings.load({}, {"REKINDLE_PORT": "7354"}, defaults={"port": 0}).server.port == 7354


def test_nothing_given_is_all_defaults() -> None:
    assert Settings.load() == Settings()


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("threads = 2")
    assert Settings.load({}, {"REKINDLE_CONFIG": str(path)}).model.threads == 2


def test_store_is_a_directory_or_off(tmp_path: Path) -> None:
    assert Settings.load({"store": str(tmp_path)}).store == StoreSettings(dir=tmp_path, enabled=True)
    assert not Settings.load({"store": "off"}).store.enabled
    assert Settings.load({"store": tmp_path}, {"REKINDLE_STORE": "off"}).store.enabled
    assert StoreSettings().directory().is_absolute()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(4096, 4096), ("4096", 4096), ("512MB", 512_000_000), ("4GiB", 4 << 30), ("1.5 kib", 1536), ("2tb", 2 * 10**12)],
)
def test_sizes(text: int | str, wanted: int) -> None:
    assert parse_size(text) == wanted


@pytest.mark.parametrize("text", ["", "4G", "-1", "many", "1 GiB GiB", True])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"hot_byte": 1}, "did you mean hot_bytes"),
        ({"kv": "int8"}, "kv: must be one of auto, q4h, q8h, bf16, fp32, q4h/q8h"),
        ({"port": "many"}, "port: must be int"),
        ({"port": 70000}, "port must be from 0 to 65535, not 70000"),
        ({"port": 10**30}, "port must be from 0 to 65535, not 1000"),
        ({"threads": 10**5000}, "threads must be from 1 to 1024, not a number of many digits"),
        ({"threads": 0}, "threads must be from 1 to 1024, not 0"),
        ({"namespace_share": 2}, "namespace_share must be above 0, at most 1, not 2"),
        ({"block_tokens": 48}, "block_tokens must be 16, 32, 64, 128 or 256, not 48"),
        ({"threads": 1.5}, "threads: must be int"),
        ({"open": "perhaps"}, "open: must be true or false"),
        ({"max_stall_s": 0}, "max_stall_s"),
        ({"model": " "}, "model is empty"),
        ({"keep_alive": "soon"}, "keep_alive: 'soon' is not a duration"),
        ({"max_loaded": 0}, "max_loaded must be from 1 to 64, not 0"),
        ({"store": ""}, "store: is empty"),
        ({"host": "0.0.0.0"}, "REKINDLE_API_KEY"),
        ({"api_key": ""}, "api_key is empty"),
    ],
)
def test_refusals_name_the_setting(flags: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Settings.load(flags)


def test_unknown_variables_and_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="environment: unknown setting 'hotbytes'"):
        Settings.load({}, {"REKINDLE_HOTBYTES": "1"})
    path = tmp_path / "x.toml"
    path.write_text("[server]\nport = 1")
    with pytest.raises(ConfigError, match="config file: unknown setting 'server'"):
        Settings.load({}, {}, path)
    path.write_text("port = ")
    with pytest.raises(ConfigError, match="config file"):
        Settings.load({}, {}, path)
    with pytest.raises(ConfigError, match="config file"):
        Settings.load({}, {}, tmp_path / "missing.toml")


@pytest.mark.parametrize(("value", "checks"), [("1", True), ("yes", True), ("0", False), ("OFF", False), ("", False)])
def test_debugging_checks_the_engine_when_it_is_idle(value: str, checks: bool) -> None:
    assert Settings.load({}, {"REKINDLE_DEBUG": value}).engine.check_when_idle is checks
    assert not Settings.load({}).engine.check_when_idle


def test_off_loopback_needs_a_key_or_open() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.0.0.2"):
        ServerSettings(host=host)
    ServerSettings(host="0.0.0.0", api_key="secret")
    ServerSettings(host="0.0.0.0", open=True)
    for host in ("0.0.0.0", "::", "example.org", "10.0.0.1"):
        with pytest.raises(ConfigError, match="or open=true to do without"):
            ServerSettings(host=host)


def test_a_key_is_not_printed() -> None:
    assert "hunter2" not in repr(ServerSettings(api_key="hunter2"))


def test_keys_open_namespaces(tmp_path: Path) -> None:
    path = tmp_path / "rekindle.toml"
    path.write_text('admin_key = "root"\n[api_keys]\nleft = "l1"\nright = "r1"\n')
    server = Settings.load({}, {}, path).server
    assert (dict(server.api_keys), server.admin_key) == ({"left": "l1", "right": "r1"}, "root")
    assert server.namespaces() == ("default", "left", "right")
    server = Settings.load({}, {"REKINDLE_API_KEYS": "left=a=b, right=c,"}).server
    assert dict(server.api_keys) == {"left": "a=b", "right": "c"}
    assert ServerSettings().namespaces() == ServerSettings(api_keys={"default": "x"}).namespaces() == ("default",)
    assert ServerSettings(host="0.0.0.0", api_keys={"left": "x"}).needs_key
    assert "hunter2" not in repr(ServerSettings(api_keys={"left": "hunter2"}, admin_key="hunter22"))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"api_keys": "left"}, "must be name=key"),
        ({"api_keys": "left=a,left=b"}, "given twice"),
        ({"api_keys": {"left": 1}}, "must be a string"),
        ({"api_keys": 3}, "must be a table"),
        ({"api_keys": {"left": "a", "right": "a"}}, "left and api_keys: right are the same"),
        ({"api_keys": {"left": "a"}, "api_key": "a"}, "are the same key"),
        ({"api_keys": {"left": "a"}, "admin_key": "a"}, "are the same key"),
        ({"api_keys": {"default": "a"}, "api_key": "b"}, "keep one"),
        ({"api_keys": {"left": ""}}, "left is empty"),
        ({"api_keys": {"../left": "a"}}, "is no name"),
        ({"api_keys": {"": "a"}}, "is no name"),
        ({"api_key": "a b"}, "visible ASCII"),
        ({"admin_key": "schlüssel"}, "visible ASCII"),
        ({"host": "0.0.0.0", "admin_key": "a"}, "REKINDLE_API_KEY"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"read_timeout_s": 0}, "read_timeout_s"),
        ({"stop_s": -1}, "stop_s"),
        ({"record": ""}, "record: is empty"),
    ],
)
def test_refusals_of_a_server_name_the_setting(flags: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        Settings.load(flags)
    assert "=b" not in str(caught.value)


def test_public_names_are_several(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('public_host = ["llm.example", "two.example:8443"]\napi_key = "k"\n')
    assert Settings.load(config_path=tmp_path / "c.toml").server.public_host == ("llm.example", "two.example:8443")
    env = {"REKINDLE_PUBLIC_HOST": "llm.example, two.example:8443", "REKINDLE_API_KEY": "k"}
    assert Settings.load(env=env).server.public_host == ("llm.example", "two.example:8443")
    given = Settings.load({"public_host": ["a.example", "[::1]:80"]}, env)
    assert given.server.public_host == ("a.example", "[::1]:80"), "a flag wins"


@pytest.mark.parametrize(
    "name", ["https://llm.example", "llm.example/", "a b", "", "llm.example:", "llm.example:x", "*", "*.example", "a@b"]
)
def test_what_is_no_public_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="public_host"):
        ServerSettings(api_key="k", public_host=(name,))


def test_a_public_name_needs_a_key_or_open() -> None:
    with pytest.raises(ConfigError, match="REKINDLE_API_KEY"):
        ServerSettings(public_host=("llm.example",))
    assert ServerSettings(public_host=("llm.example",), open=True).public_host == ("llm.example",)
    with pytest.raises(ConfigError, match="list of texts"):
        Settings.load({"public_host": [1]})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("host = ['a']", "host: must be a text, not a list"),
        ("host = 7", "host: must be a text, not 7"),
        ("model = 1.5", "model: must be a text, not 1.5"),
        ("[model]\nmodel = 'x'", "model: must be a text, not a table"),
        ("[server]\nport = 1", "unknown setting 'server'; settings have no sections"),
        ("store = 3", "store: must be a text"),
        ("store = ['off']", "store: must be a text, not a list"),
        ('store = "a\\u0000b"', "store: a path holds no NUL"),
        ("kv = ['q4h']", "kv: must be one of"),
        ("open = ['on']", "open: must be true or false"),
        ("port = [1]", "port: must be int"),
        ("port = 2020-01-01", "port: must be int"),
        ("request_timeout_s = inf", "request_timeout_s must be a finite number"),
        ("request_timeout_s = nan", "request_timeout_s must be a finite number"),
        ("agent_ttl_s = inf", "agent_ttl_s must be a finite number"),
        ("max_stall_s = inf", "max_stall_s must be a finite number"),
        ("stop_s = inf", "stop_s must be a finite number"),
        ("read_timeout_s = inf", "read_timeout_s must be a finite number"),
        (f"stop_s = 1{'0' * 400}", "stop_s: must be float"),
        (f"max_body_bytes = {'9' * 23}", "max_body_bytes must be at most"),
        (f"max_body_bytes = '{'9' * 23}'", "max_body_bytes must be at most"),
        (f"hot_bytes = '{'9' * 400}'", "is not a size"),
        ("hot_bytes = 1.5", "is not a size"),
        ("hot_bytes = ['1']", "is not a size"),
        (f"max_running = {'9' * 23}", "max_running must be at most"),
        ("a = " + "[" * 5_000 + "]" * 5_000, "too deep"),
    ],
)
def test_values_of_other_types_and_endless_ones_are_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "rekindle.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        Settings.load({}, {}, path)


def test_what_is_no_finite_number_is_refused_from_the_library_too() -> None:
    with pytest.raises(ConfigError, match="ping_s must be a finite number"):
        ServerSettings(ping_s=float("inf"))
    with pytest.raises(ConfigError, match="finite"):
        Settings.load({"request_timeout_s": "inf"})


@pytest.mark.parametrize(
    ("part", "given", "named"),
    [
        (StoreSettings, {"disk_bytes": "3"}, "disk_bytes: must be int, not '3'"),
        (StoreSettings, {"dir": "/tmp"}, "dir: must be a path, not '/tmp'"),
        (StoreSettings, {"enabled": "off"}, "enabled: must be true or false, not 'off'"),
        (StoreSettings, {"readers": None}, "readers: must be int, not None"),
        (StoreSettings, {"readers": True}, "readers: must be int, not True"),
        (StoreSettings, {"agent_ttl_s": "1"}, "agent_ttl_s: must be float, not '1'"),
        (CacheSettings, {"reuse": "never"}, "reuse: must be one of on, off, not 'never'"),
        (CacheSettings, {"block_tokens": 64.0}, "block_tokens: must be int, not 64.0"),
        (ModelSettings, {"model": Path("/tmp")}, "model: must be a text, not "),
        (ModelSettings, {"kv": 4}, "kv: must be one of auto, q4h, q8h, bf16, fp32, q4h/q8h, q8h/q4h, "),
        (PromptSettings, {"normalise": ["tools"]}, "normalise: must be a text, not a list"),
        (EngineSettings, {"check_when_idle": 1}, "check_when_idle: must be true or false, not 1"),
        (ServerSettings, {"public_host": "llm.example"}, "public_host: must be a tuple of texts, not 'llm.example'"),
        (ServerSettings, {"host": None}, "host: must be a text, not None"),
        (ServerSettings, {"api_keys": "left=hunter2"}, "api_keys: must be a table of texts"),
        (ServerSettings, {"api_keys": {"left": 1}}, "api_keys: must be a table of texts"),
    ],
)
def test_a_part_of_its_own_refuses_other_types(part: Any, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(named)}") as caught:
        part(**given)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"slot": "first"}, "slot: must be off, auto, or a number from 0 to 1023, not 'first'"),
        ({"slot": 1024}, "slot: must be off"),
        ({"slot": "-1"}, "slot: must be off"),
        ({"slot": "007"}, "slot: must be off"),
        ({"slot": "²"}, "slot: must be off"),
        ({"slot": True}, "slot: must be a text"),
        ({"secret": "hunter2"}, "secret: must have at least 16 characters"),
        ({"secret": "hunter2 and more of it\n"}, "secret: begins or ends with a blank"),
        ({"secret": "hunter2\nand more of it"}, "secret: has characters that cannot be printed"),
        ({"secret": b"hunter2 and more of it"}, "secret: must be a text"),
    ],
)
def test_what_a_slot_and_a_secret_may_be(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(named)}") as caught:
        Settings.load(given)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=f"^{re.escape(named.partition(':')[0])}: ") as caught:
        StoreSettings(**given)
    assert "hunter2" not in str(caught.value)


def test_a_slot_is_a_number_or_a_text_and_a_secret_has_no_flag(tmp_path: Path) -> None:
    assert [Settings.load({"slot": slot}).store.slot for slot in (7, "7", "auto", "off")] == ["7", "7", "auto", "off"]
    path = tmp_path / "rekindle.toml"
    path.write_text('slot = 3\nsecret = "hunter2 and more of it"\n')
    settings = Settings.load({}, {"REKINDLE_SLOT": "4"}, path)
    assert (settings.store.slot, settings.store.secret) == ("4", "hunter2 and more of it")
    assert (SETTINGS["secret"].flag, SETTINGS["secret"].variable) == (None, "REKINDLE_SECRET")
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in json.dumps(flags_of(settings), default=str)
    assert variables(settings, tmp_path)["secret"] == "hunter2 and more of it"  # for a process of our own


def test_the_key_of_a_store_is_64_digits_from_a_variable_or_a_file(tmp_path: Path) -> None:
    digits, path = "0aB3" * 16, tmp_path / "store.key"
    path.write_text(f"{digits}\n")
    for given in ({"REKINDLE_STORE_KEY": digits}, {"REKINDLE_STORE_KEY_FILE": str(path)}):
        settings = Settings.load({}, given)
        assert settings.store.master_key() == bytes.fromhex(digits)
        assert digits not in repr(settings) + json.dumps(flags_of(settings), default=str)
        passed_on = variables(settings, tmp_path)  # to a process of our own
        assert {f"REKINDLE_{name.upper()}": value for name, value in passed_on.items() if "store_key" in name} == given
    assert (SETTINGS["store_key"].flag, SETTINGS["store_key_file"].flag) == (None, "--store-key-file")
    assert StoreSettings().master_key() is None
    for text in ("hunter2", digits + "0", digits[:-1] + "g", ""):
        with pytest.raises(ConfigError, match=r"^store_key: it is no key, which is 64 hexadecimal digits") as caught:
            StoreSettings(key=text)
        assert "hunter2" not in str(caught.value)
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"^store_key_file: .* holds no key") as caught:
            StoreSettings(key_file=path).master_key()
        assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="both given"):
        StoreSettings(key=digits, key_file=path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        StoreSettings(key_file=tmp_path / "missing").master_key()


def test_a_slot_has_sessions_of_its_own_and_shares_responses(tmp_path: Path) -> None:
    store = StoreSettings(dir=tmp_path, slot="3")
    assert (store.directory(), store.own_directory()) == (tmp_path, tmp_path / "slot-3")
    assert store.text_files() == (tmp_path / "responses.db", tmp_path / "slot-3" / "sessions.db")
    _, sessions = StoreSettings(slot="3").text_files()
    assert sessions.parent.name == "slot-3" and sessions.parent.parent == StoreSettings().text_files()[1].parent


def test_an_integer_is_a_number_of_seconds() -> None:
    assert ServerSettings(ping_s=5).ping_s == 5 and StoreSettings(agent_ttl_s=None, dir=Path("/tmp")).enabled


def test_a_size_is_exact() -> None:
    assert parse_size("9007199254740993") == 9007199254740993


def test_errors_of_the_library_name_settings_and_no_flags() -> None:
    """The CLI, the server and what runs with vLLM may name some; the rest is used without a command line, too."""
    package, own = Path(rekindle.__file__).parent, ("cli", "server", "harness", "demo")
    others = {package / "compute/cpu/kernels/build.py", package / "model/short_names.py"}  # the compiler's flags, pip's
    found = [
        f"{path.relative_to(package)}:{node.lineno}: {node.value}"
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] not in own and path not in others
        for node, is_doc in strings(ast.parse(path.read_text()))
        if not is_doc and re.search(r"(?<![\w-])--[a-z]", node.value)
    ]
    assert found == []


def strings(tree: ast.Module) -> Iterator[tuple[ast.Constant, bool]]:
    """Every text of a module, and whether it is a docstring."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node, id(node) in docs
