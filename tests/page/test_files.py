"""The files of the page: who gets them, what a browser may do with them, how long it keeps them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.datastructures import Headers

import rekindle_sessions
from rekindle import Engine
from rekindle.config import ServerSettings, Settings
from rekindle.server import page
from rekindle.server.border import Problem
from rekindle.server.gate.caller import Guard
from rekindle.server.gate.keys import Access, Keys
from tests.proofs import proved
from tests.server.conftest import Served, serving

STATIC = Path(page.__file__).parent / "static"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    settings = Settings.load({"store": "off", "threads": 1, "hot_bytes": "64MiB", "api_key": "secret"})
    with proved(Engine(settings)) as engine, serving(engine, settings.server) as running:
        yield running


VIEW = Path(rekindle_sessions.__file__).parent / "page"
FILES = {each.name: each for folder in (STATIC, VIEW) for each in folder.iterdir() if each.suffix != ".html"}
SCRIPTS = [path for path in FILES.values() if path.suffix == ".js"]


def test_the_page_has_the_views_of_extensions(served: Served) -> None:
    index, view = (STATIC / "index.html").read_text(), (VIEW / "sessions.html").read_text()
    for path in ("/", "/page/index.html"):
        shown = served.send("GET", path).body.decode()
        assert view in shown and '<a href="#sessions" id="to-sessions">Sessions</a>' in shown
        assert 'data-views="sessions"' in shown and "<!--" not in shown
        assert len(shown) > len(index)
    assert served.send("GET", "/page/sessions.html").status == 404


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in sorted(FILES))])
def test_every_file_is_served_without_a_key_and_sent_once(served: Served, path: str) -> None:
    first = served.send("GET", path)
    assert first.status == 200
    assert path == "/" or first.body == FILES[path.removeprefix("/page/")].read_bytes()
    assert first.headers["cache-control"] == "no-cache"
    again = served.send("GET", path, if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    assert served.send("GET", path, if_none_match='"another"').status == 200


@pytest.mark.parametrize(("suffix", "kind"), [("js", "text/javascript"), ("css", "text/css"), ("svg", "image/svg+xml")])
def test_files_say_what_they_are(served: Served, suffix: str, kind: str) -> None:
    for path in (path for path in FILES.values() if path.suffix == f".{suffix}"):
        answer = served.send("GET", f"/page/{path.name}")
        assert answer.headers["content-type"].startswith(kind)
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_browser_may_load_from_here_only(served: Served) -> None:
    policy = served.send("GET", "/").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("path", ["/page/nothing.js", "/page/..%2fpage.py", "/page/__init__.py", "/page/"])
def test_there_are_no_other_files(served: Served, path: str) -> None:
    assert served.send("GET", path).status == 404


def test_what_the_page_shows_needs_the_key(served: Served) -> None:
    assert served.send("GET", "/overview").status == 401
    assert served.send("GET", "/overview", key="secret").status == 200
    assert served.send("GET", "/pages").status == 401


def test_the_page_is_for_our_names_only() -> None:
    async def nothing(*_: object) -> None:
        """The application behind the guard."""

    settings = ServerSettings(api_key="secret")
    guard = Guard(nothing, settings=settings, keys=Keys(settings))
    assert guard.judge("/", Headers({"host": "localhost"})) == Access(has_key=False)
    refused = guard.judge("/page/main.js", Headers({"host": "evil.example"}))
    assert isinstance(refused, Problem)
    assert refused.status == 403


def test_nothing_is_loaded_from_elsewhere_or_written_as_html() -> None:
    for path in [*FILES.values(), *VIEW.glob("*.html"), STATIC / "index.html"]:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import" + (r"|url\(" if path.suffix == ".css" else ""), text), path.name
    for path in SCRIPTS:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", path.read_text()), (
            path.name
        )
    index = (STATIC / "index.html").read_text()
    assert not re.search(r"\son\w+=|style=|<script>", index)


def test_scripts_import_what_is_there() -> None:
    for path in SCRIPTS:
        for name in re.findall(r'from "\./([^"]+)"', path.read_text()):
            assert name in FILES, f"{path.name} imports {name}"


def test_scripts_are_small() -> None:
    assert {path.name: lines for path in SCRIPTS if (lines := path.read_text().count("\n")) > 300} == {}
