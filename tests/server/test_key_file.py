"""The file of keys: commands that write it, and a server that follows it while it runs."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest
from starlette.datastructures import Headers
from typer.testing import CliRunner

from rekindle import __version__
from rekindle.cli import app
from rekindle.config import ServerSettings
from rekindle.config.key_file import KeyFile
from rekindle.errors import ConfigError
from rekindle.server.gate.keys import Keys
from tests.server.conftest import Served, serving

HASH = "0" * 64


def command(path: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and all output of `rekindle keys`."""
    done = CliRunner(env={"COLUMNS": "200", "REKINDLE_KEY_FILE": str(path)}).invoke(app, ["keys", *arguments])
    return done.exit_code, done.output


def made(path: Path, *arguments: str) -> tuple[str, str]:
    """Id and key of a new one."""
    code, said = command(path, "new", *arguments)
    assert code == 0, said
    found = re.search(r"^(k\w+) opens .*\n(rekindle_[\w-]{43})$", said, re.MULTILINE)
    assert found is not None, said
    return found[1], found[2]


def test_commands_leave_the_rest_of_the_file_as_it_was(tmp_path: Path) -> None:
    path, link = tmp_path / "keys.toml", tmp_path / "link.toml"
    first, key = made(path, "ada")
    assert path.stat().st_mode & 0o777 == 0o600 and key not in path.read_text()
    path.write_text(f"# ours\n{path.read_text()}# Bo pays\n[namespaces.bo]\nrequests_per_minute = 2")
    path.chmod(0o640)
    link.symlink_to(path)
    second, _ = made(link, "bo", "--admin")
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    before = path.read_text()
    assert command(link, "revoke", first)[0] == 0
    assert [line for line in path.read_text().splitlines() if not line.startswith("revoked = ")] == before.splitlines()
    ours, theirs = KeyFile.read(path).keys
    assert (ours.id, ours.namespace, ours.is_admin, theirs.id, theirs.is_admin) == (first, "ada", False, second, True)
    assert ours.revoked is not None and theirs.revoked is None
    code, said = command(path, "list")
    assert code == 0 and re.search(rf"{second}\s+bo\s+yes", said) and key not in said

    assert command(path, "revoke", first) == (2, f"rekindle: key {first!r} of {path}: it is revoked already\n")
    code, said = command(path, "new", "no name")
    assert code == 2 and "namespace: 'no name' is no name" in said
    aside = path.with_name("keys.toml.new")
    aside.touch()
    code, said = command(path, "new", "ada")
    assert code == 2 and f"remove {aside}" in said
    aside.unlink()
    path.write_text(f'keys.a = {{ namespace = "ada", sha256 = "{HASH}" }}\n')
    code, said = command(path, "revoke", "a")
    assert code == 2 and "remove the key by hand" in said
    assert "revoked" not in path.read_text()
    assert "REKINDLE_KEY_FILE" in CliRunner().invoke(app, ["keys", "list"]).output


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[keys.a\n", "line 1"),
        ("[key.a]\n", "unknown name 'key'; did you mean"),
        ('[keys.a]\nnamespace = "ada"\n', "keys.a: sha256: must have 64 digits"),
        (f'[keys.a]\nnamespace = "ada"\nsha256 = "{HASH[1:]}"\n', "keys.a: sha256: must have 64 digits"),
        (f'[keys.a]\nsha256 = "{HASH}"\n', "keys.a: namespace: must be a text"),
        (f'[keys.a]\nnamespace = "a/b"\nsha256 = "{HASH}"\n', "keys.a: namespace: 'a/b' is no name"),
        (f'[keys.a]\nnamespace = "ada"\nsha256 = "{HASH}"\nrevoked = true\n', "keys.a: revoked: must be a date"),
        (
            "".join(f'[keys.{x}]\nnamespace = "{x}"\nsha256 = "{HASH}"\n' for x in "ab"),
            "keys.a and keys.b are the same",
        ),
        ("[namespaces.ada]\nrequests_per_minute = 0\n", "namespaces.ada: requests_per_minute: must be a whole number"),
        ("[namespaces.ada]\nrequests_a_minute = 1\n", "namespaces.ada: unknown name 'requests_a_minute'; did you mean"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        KeyFile.parse(text, tmp_path / "keys.toml")
    assert why in str(refused.value) and HASH not in str(refused.value)


def test_a_key_file_alone_asks_everybody_for_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    _, ada = made(path, "ada")
    keys = Keys(ServerSettings(key_file=path, host="0.0.0.0"))
    assert keys.access(Headers({})) is None and keys.access(Headers({"x-api-key": "another"})) is None
    granted = keys.access(Headers({"x-api-key": ada}))
    assert granted is not None and (granted.namespace, granted.is_admin) == ("ada", False)


def test_a_server_follows_the_file(served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.toml"
    first, ada = made(path, "ada")
    settings = ServerSettings(key_file=path, api_key="of-the-settings")
    with serving(served.engine, settings) as running, caplog.at_level(logging.INFO, "rekindle.server"):

        def status(key: str, way: str = "/v1/models") -> int:
            return running.send("GET", way, key=key).status

        assert (status(ada), status("of-the-settings"), status("")) == (200, 200, 401)
        assert (status(ada, "/metrics"), status("of-the-settings", "/metrics")) == (403, 403)
        _, bo = made(path, "bo")
        _, root = made(path, "ops", "--admin")
        assert (status(bo), status(root, "/metrics"), status(bo, "/v1/agents?namespace=ada")) == (200, 200, 403)
        assert running.chat("Whose memory is this?", key=bo, agent="bos-own").status == 200
        assert "bos-own" in running.send("GET", "/v1/agents", key=bo).body.decode()
        assert "bos-own" not in running.send("GET", "/v1/agents", key=ada).body.decode()

        sound = path.read_text()
        path.write_text(sound + "[namespaces.ada]\nrequests_per_minute = 'two'\n")
        assert (status(ada), status(bo)) == (200, 200)
        health = running.send("GET", "/health/ready", key=bo).json
        assert health["status"] == "degraded" and "requests_per_minute: must be" in health["problems"][0]
        assert caplog.text.count("the keys that were read before stay") == 1
        figures = running.send("GET", "/metrics", key=root).body.decode()
        assert "\nrekindle_problems 1.0\n" in figures and "\nrekindle_computes 1.0\n" in figures
        assert "\nprocess_open_fds " in figures and f'rekindle_build_info{{version="{__version__}"}}' in figures
        path.unlink()
        assert (status(ada), status("of-the-settings")) == (200, 200)
        path.write_text(sound + "[namespaces.ada]\nrequests_per_minute = 2\n")
        assert running.send("GET", "/health/ready", key=bo).json["status"] == "ok"
        assert [status(ada), status(ada), status(ada), status(bo)] == [200, 200, 429, 200]

        assert command(path, "revoke", first)[0] == 0
        assert (status(ada), status(bo)) == (401, 200)
        at = path.stat()
        path.write_text(sound.replace("bo", "ox"))
        os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))  # as a copy that keeps times: its size still differs
        assert running.send("GET", "/v1/agents", key=bo).json["data"] == []
