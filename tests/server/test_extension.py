"""A server without the package of sessions: nothing of them is there, and nothing that they keep is lost in silence."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from rekindle import Engine
from rekindle.cli.remote import Unreachable
from rekindle.cli.stopped import purge_in
from rekindle.config import ServerSettings, Settings, StoreSettings
from rekindle.errors import ConfigError, StoreError
from rekindle.extensions import Group
from rekindle.server.app import create_app
from tests.proofs import proved
from tests.server.conftest import Served, serving

GROUPS: tuple[Group, ...] = ("rekindle.commands", "rekindle.server", "rekindle.forget")


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The entry points that are found; none at first."""
    found: list[EntryPoint] = []
    monkeypatch.setattr("rekindle.extensions.entry_points", lambda group: EntryPoints(found).select(group=group))
    yield found


@pytest.fixture
def served(points: list[EntryPoint], tmp_path: Path) -> Iterator[Served]:
    settings = Settings.load({"store": tmp_path, "threads": 1, "hot_bytes": "64MiB"})
    with proved(Engine(settings)) as engine, serving(engine, ServerSettings()) as running:
        yield running


def test_the_entry_points_of_this_environment_are_those_of_the_wheels() -> None:
    found = {group: [point.name for point in importlib.metadata.entry_points(group=group)] for group in GROUPS}
    assert {group: sorted(names) for group, names in found.items()} == {
        "rekindle.commands": ["lab", "models", "sessions"],
        "rekindle.server": ["sessions"],
        "rekindle.forget": ["sessions"],
    }


def test_without_extensions_the_server_answers_and_the_page_has_one_view(served: Served) -> None:
    assert served.chat("Hello!", agent="ada").status == 200
    assert served.send("GET", "/v1/coordination/sessions").status == 404
    page = served.send("GET", "/").body.decode()
    assert "sessions" not in page and 'data-views=""' in page
    paths = served.send("GET", "/openapi.json").json["paths"]
    assert paths and not [path for path in paths if "coordination" in path]
    assert served.send("DELETE", "/v1/agents/ada").status == 200


def test_an_agent_is_not_deleted_while_its_sessions_cannot_be(served: Served, tmp_path: Path) -> None:
    assert served.chat("Hello!", agent="ada").status == 200
    (tmp_path / "sessions.db").write_bytes(b"")
    for method, path in (("DELETE", "/v1/agents/ada"), ("POST", "/v1/agents/ada/purge")):
        refused = served.send(method, path)
        assert refused.status == 503 and "pip install 'rekindle[serve]'" in refused.error["message"]
    assert [agent["id"] for agent in served.send("GET", "/v1/agents").json["data"]] == ["ada"]
    (tmp_path / "sessions.db").unlink()
    assert served.send("DELETE", "/v1/agents/ada").status == 200


def test_nor_is_it_purged_from_a_stopped_store(points: list[EntryPoint], tmp_path: Path) -> None:
    (tmp_path / "sessions.db").write_bytes(b"")
    with pytest.raises(StoreError, match="rekindle-sessions"):
        purge_in(StoreSettings(dir=tmp_path), "default", "ada", Unreachable("no server"))


def test_an_extension_of_another_version_ends_the_start(points: list[EntryPoint]) -> None:
    points.append(EntryPoint("sessions", "rekindle_sessions.http.extension:gone", "rekindle.server"))
    settings = Settings.load({"store": "off", "threads": 1, "hot_bytes": "64MiB"})
    with Engine(settings) as engine, pytest.raises(ConfigError, match="install both in one version"):
        create_app(engine, settings.server)
