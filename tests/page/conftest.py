"""A Chromium that is there already, and real server processes for it. Without one the tests skip, which fails in CI.

`test_real_llama.py` is collected where there is a llama-server: `make engines` builds one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from rekindle.config import ServerSettings
from rekindle.harness.client import ServerProcess, free_port
from tests.backends.llama.real_server import executable
from tests.forks import ForkedServer
from tests.programs import program

collect_ignore = [] if executable() else ["test_real_llama.py"]
# No window, no sandbox (CI is root), and no word to anybody but the page's own server.
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
FLAGS = ("--threads", "1", "--hot-bytes", "64MiB", "--max-chunk-tokens", "16")
WAIT_MS = 60_000
# What a browser says of a server that stops and comes back.
AWAY = ("Failed to load resource: net::", "Failed to load resource: the server responded with a status of 503")
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")  # while it lives, an event loop runs in the tests' own thread
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program("chromium"), args=ARGUMENTS)
        yield browser
        browser.close()


@dataclass
class Site:
    """A server process on a port that stays its own, with a store that lasts."""

    directory: Path
    settings: ServerSettings
    flags: Sequence[str] = FLAGS
    process: ServerProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    def start(self) -> None:
        """Begin to serve; returns when it answers."""
        flags = [*self.flags, "--store", str(self.directory / "store")]
        self.process = ForkedServer(flags, log=self.directory / "log", server=self.settings)
        self.process.wait_ready()

    def stop(self) -> None:
        """A graceful end."""
        assert self.process is not None
        assert self.process.stop() == 0, self.process.log_tail()


@contextmanager
def site_in(directory: Path, *, api_key: str | None = None, flags: Sequence[str] = FLAGS) -> Iterator[Site]:
    """A running site; it never outlives this."""
    site = Site(directory, ServerSettings(port=free_port(), api_key=api_key), flags)
    site.start()
    try:
        yield site
    finally:
        if site.process is not None:
            site.process.__exit__()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_in(tmp_path_factory.mktemp("site")) as running:
        yield running


@dataclass
class Seen:
    """What a page asked for, and what went wrong in it. `pardoned` are beginnings of errors that a test provokes."""

    urls: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    pardoned: tuple[str, ...] = ()

    def watch(self, page: Page) -> None:
        """Note all of it from now on."""
        page.on("request", lambda request: self.urls.append(request.url))
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def check(self, home: str) -> None:
        """Nobody else was asked for anything, and nothing went wrong that was not meant to."""
        assert [url for url in self.urls if not url.startswith(f"{home}/")] == []
        assert [error for error in self.errors if not error.startswith(self.pardoned or "\0")] == []


Open = Callable[..., Page]


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def opened(browser: Browser, seen: Seen) -> Iterator[Open]:
    """Opens a site in a browser of its own, with a fresh storage; whatever happens there is held to `Seen.check`."""
    pages: list[tuple[Page, str]] = []

    def open_page(home: str, path: str = "/", *, width: int = 1280, scheme: str = "light", is_up: bool = True) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        seen.watch(page)
        pages.append((page, home))
        page.goto(home + path)
        if is_up:
            page.wait_for_selector("body[data-connection=up]")
        return page

    yield open_page
    for page, home in pages:
        if not page.is_closed():
            page.unroute_all(behavior="ignoreErrors")  # the page polls: a route may be answering for it right now
        page.context.close()
        seen.check(home)


def ask(page: Page, text: str, *, agent: str | None = None) -> None:
    """Say something in the chat and wait for the whole answer."""
    if agent is not None:
        page.get_by_label("Agent to chat with").fill(agent)
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Send").wait_for()
    page.locator("#chat-log .assistant:last-child .outcome").wait_for()
