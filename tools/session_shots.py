"""Screenshots of a real server's page with the bundled model: empty, with agents, after a restart, with a session.

python tools/session_shots.py shots/

Writes NAME-light.png and NAME-dark.png for each, with a temporary store. Needs the dev extras and a Chromium on the
PATH (or `--browser`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Page, expect, sync_playwright

from rekindle.config import ServerSettings
from rekindle.harness.client import Client, ServerProcess, free_port

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# No window, no sandbox (this runs as root), and no traffic except to the page's own server.
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WIDTH, HEIGHT = 1280, 900
WAIT_MS = 60_000
CHATS = {
    "mira": ("Remember that the copper key is in the attic.", "Where is the copper key?"),
    "otto": ("Remember that Hugo owns the silver bell.", "Who owns the silver bell?", "Say hello."),
    "petra": ("Remember that the code of the north gate is 4821.", "What is the code of the north gate?"),
    "tomas": ("Tell me a story.", "Remember that the glass lantern is in the barn.", "Where is the glass lantern?"),
}
SESSION: dict[str, Any] = {
    "title": "The harbour committee",
    "setting": "The keepers of a small harbour town share what they know.",
    "agents": [
        {"name": "Ada", "role": "archivist", "persona": "The copper key is in the attic."},
        {"name": "Bo", "role": "smith", "persona": "The copper key is in the attic."},
        {"name": "Cy", "role": "pilot", "persona": "The copper key is in the cellar."},
        {"name": "Dee", "role": "gardener"},
    ],
    "topology": "broadcast",
    "opening": "Tell me what you know. Where is the copper key?",
    "sampling": {"max_tokens": 24, "temperature": 0},
}
AGAIN = "You have heard each other. Where is the copper key?"
QUESTION = "Ada and Bo said: The copper key is in the attic. Where is the copper key?"
ROOT = "/v1/coordination/sessions"


@contextmanager
def server(directory: Path, settings: ServerSettings) -> Iterator[str]:
    """Run a server on the store in `directory`; yield its address."""
    flags = ("--threads", "1", "--hot-bytes", "64MiB", "--store", str(directory / "store"))
    with ServerProcess(flags, log=directory / "log", server=settings) as process:
        process.wait_ready()
        yield f"http://127.0.0.1:{settings.port}"
        if process.stop() != 0:
            raise SystemExit(f"the server did not stop cleanly:\n{process.log_tail()}")


def post(settings: ServerSettings, path: str, body: Any) -> Any:
    """Post to a route of sessions; return its answer."""
    with Client(settings.port).send("POST", ROOT + path, body, {}) as response:
        return json.loads(response.read())


def go(page: Page, address: str) -> None:
    """Load an address afresh and wait until the page is connected."""
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("body[data-connection=up]")


def shoot(page: Page, folder: Path, name: str, *, whole: bool = True) -> None:
    """Capture the page from its top in both colour schemes."""
    page.evaluate("document.activeElement.blur(), window.scrollTo(0, 0)")
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        picture(page, folder / f"{name}-{scheme}.png", whole=whole)


def picture(page: Page, path: Path, *, whole: bool) -> None:
    """Take one screenshot; `whole`: of the full page height."""
    page.screenshot(path=path, full_page=whole)
    print(path)


def chat(page: Page) -> None:
    """Talk with every agent, in turn, through the page."""
    for agent, texts in CHATS.items():
        page.get_by_label("Agent to chat with").fill(agent)
        for number, text in enumerate(texts, start=1):
            page.get_by_label("Message", exact=True).fill(text)
            page.keyboard.press("Enter")
            expect(page.locator("#chat-log .assistant .outcome")).to_have_count(number)
            page.get_by_role("button", name="Send").wait_for()


def hold(page: Page, settings: ServerSettings, folder: Path, home: str) -> None:
    """Run a session: a round in each scheme, captured while an agent speaks; then a whisper and a vote."""
    session = post(settings, "", SESSION)["id"]
    go(page, f"{home}/#sessions/{session}")
    for number, scheme in enumerate(SCHEMES, start=1):
        page.emulate_media(color_scheme=scheme)
        if number > 1:
            post(settings, f"/{session}/messages", {"text": AGAIN})
            expect(page.locator("#transcript")).to_contain_text(AGAIN)
        page.get_by_role("button", name="Round").click()
        page.wait_for_selector("#transcript .is-speaking .words:not(:empty)")
        picture(page, folder / f"session-running-{scheme}.png", whole=False)
        expect(page.locator("#transcript .mark")).to_have_count(number)
    post(settings, f"/{session}/whisper", {"from": "Ada", "to": "Bo", "text": "The code of the north gate is 4821."})
    post(settings, f"/{session}/vote", {"question": QUESTION, "options": ["attic", "cellar"]})
    expect(page.locator("#transcript .mark").filter(has_text="Decided")).to_be_visible()
    shoot(page, folder, "session")


def main() -> None:
    """Parse arguments, serve, and take the screenshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--browser", default=next(filter(None, map(shutil.which, BROWSERS)), None))
    given = parser.parse_args()
    if given.browser is None:
        parser.error("there is no Chromium on the PATH: name one with --browser")
    given.folder.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=WAIT_MS)
    settings = ServerSettings(port=free_port())
    with tempfile.TemporaryDirectory(prefix="rekindle-shots-") as name, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.browser, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.set_default_timeout(WAIT_MS)
        with server(Path(name), settings) as home:
            go(page, home)
            expect(page.locator("#first-curl")).to_be_visible()
            shoot(page, given.folder, "empty")
            chat(page)
            expect(page.locator("tr.agent")).to_have_count(len(CHATS))
            shoot(page, given.folder, "agents")
        with server(Path(name), settings) as home:
            go(page, home)
            expect(page.locator("tr.agent")).to_have_count(len(CHATS))
            shoot(page, given.folder, "restarted")
            hold(page, settings, given.folder, home)
        browser.close()


if __name__ == "__main__":
    main()
