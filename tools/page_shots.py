"""Screenshots of a real server's page with the bundled model, wide and on a phone, light and dark.

python tools/page_shots.py shots/

Writes NAME-WIDTH-SCHEME.png for each of: nobody has spoken, agents (branches, a pin, a miss, one on disk only), one of
them opened, a question, no session, one that runs, one that decided; after a restart, a server that is away, one that
asks for a key. With temporary stores. Needs the dev extras and a Chromium on the PATH (or `--browser`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
WIDTHS = {"wide": (1400, 900), "narrow": (390, 844)}
WAIT_MS = 60_000
RULES = "You keep the books of a small harbour town. Names and places are written as they were said. " * 6
TALKS: Mapping[str, Sequence[str]] = {
    "mira": ("Remember that the copper key is in the attic.", "Where is the copper key?"),
    "otto": ("Remember that Hugo owns the silver bell.", "Who owns the silver bell?", "Say hello."),
    "review-of-the-harbour-accounts/second-reader": ("Remember that the code of the north gate is 4821.",),
}
LONG = "The ledger of the mill: " + " ".join(f"day {day}, {day * 37 % 50} sacks of barley;" for day in range(160))
CHAT = ("Remember that the iron anchor is on the pier.", "Where is the iron anchor?")
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
def server(directory: Path, settings: ServerSettings) -> Iterator[None]:
    """Run a server on the store in `directory`."""
    flags = ("--threads", "1", "--hot-bytes", "64MiB", "--store", str(directory / "store"))
    with ServerProcess(flags, log=directory / "log", server=settings) as process:
        process.wait_ready()
        yield
        if process.stop() != 0:
            raise SystemExit(f"the server did not stop cleanly:\n{process.log_tail()}")


def post(client: Client, path: str, body: Any = None) -> Any:
    """Post to a route; return its answer."""
    with client.send("POST", path, body, {}) as response:
        return json.loads(response.read())


@dataclass(frozen=True, slots=True)
class Camera:
    """A browser's page, and the folder that its pictures go to."""

    page: Page
    folder: Path

    def go(self, address: str, *, state: str = "up") -> None:
        """Load an address afresh and wait until the page is connected, or needs a key."""
        self.page.goto("about:blank")
        self.page.goto(address)
        self.page.wait_for_selector(f"body[data-connection={state}]")

    def shoot(self, name: str, *, whole: bool = True) -> None:
        """Capture the page from its top, in all widths and colour schemes; `whole`: of the full height."""
        for width, (pixels, height) in WIDTHS.items():
            self.page.set_viewport_size({"width": pixels, "height": height})
            if self.page.get_attribute("body", "data-connection") == "up":
                for _ in range(2):  # what comes with the first is drawn, in this width, when the second comes
                    self.page.wait_for_event("response", lambda response: response.url.endswith("/overview"))
            self.page.mouse.move(0, 0)
            self.page.evaluate("document.activeElement.blur(), window.scrollTo(0, 0)")
            for scheme in SCHEMES:
                self.take(f"{name}-{width}", scheme, whole=whole)

    def take(self, name: str, scheme: Literal["light", "dark"], *, whole: bool) -> None:
        """Take one picture."""
        self.page.emulate_media(color_scheme=scheme)
        path = self.folder / f"{name}-{scheme}.png"
        self.page.screenshot(path=path, full_page=whole)
        print(path)


def talk(client: Client, agent: str, texts: Sequence[str], *, system: str = RULES) -> list[dict[str, str]]:
    """Talk with an agent; return the conversation."""
    said = [{"role": "system", "content": system}]
    for text in texts:
        said.append({"role": "user", "content": text})
        said.append({"role": "assistant", "content": client.chat(said, agent=agent, max_tokens=16).text})
    return said


def remember(client: Client) -> None:
    """Give agents what the page shows: shared beginnings, branches, a pin, a fork, a miss, one on disk only."""
    talks = {agent: talk(client, agent, texts) for agent, texts in TALKS.items()}
    for question in ("Who keeps the key?", "Is the key made of copper?"):
        client.chat([*talks["mira"][:3], {"role": "user", "content": question}], agent="mira", max_tokens=16)
    client.chat(talks["otto"][:-1], agent="otto", max_tokens=16)
    post(client, "/v1/agents/mira/pin")
    post(client, "/v1/agents/mira/fork", {"target": "mira/night"})
    talk(client, "ledger", [LONG, "How many sacks?"])
    for minute in (14, 15):
        talk(client, "petra", ["Good morning."], system=f"It is 4 March 2026, 10:{minute}. {RULES}")
    talk(client, "tomas", ["Remember that the lantern is in the barn."], system="You keep the barn. " * 40)
    post(client, "/v1/agents/tomas/offload")


def chat(page: Page) -> None:
    """Talk with an agent through the page."""
    for number, text in enumerate(CHAT, start=1):
        page.get_by_label("Message", exact=True).fill(text)
        page.keyboard.press("Enter")
        expect(page.locator("#chat-log .assistant .outcome")).to_have_count(number)
        page.get_by_role("button", name="Send").wait_for()


def hold(camera: Camera, client: Client, home: str) -> None:
    """Run a session: a round in each scheme, captured while an agent speaks; then a whisper and a vote."""
    page = camera.page
    session = post(client, ROOT, SESSION)["id"]
    camera.go(f"{home}/#sessions/{session}")
    for number, (scheme, (width, (pixels, height))) in enumerate(zip(SCHEMES, WIDTHS.items(), strict=True), start=1):
        page.set_viewport_size({"width": pixels, "height": height})
        if number > 1:
            post(client, f"{ROOT}/{session}/messages", {"text": AGAIN})
            expect(page.locator("#transcript")).to_contain_text(AGAIN)
        page.get_by_role("button", name="Round").click()
        page.wait_for_selector("#transcript .is-speaking .words:not(:empty)")
        camera.take(f"session-running-{width}", scheme, whole=False)
        expect(page.locator("#transcript .mark")).to_have_count(number)
    whisper = {"from": "Ada", "to": "Bo", "text": "The code of the north gate is 4821."}
    post(client, f"{ROOT}/{session}/whisper", whisper)
    post(client, f"{ROOT}/{session}/vote", {"question": QUESTION, "options": ["attic", "cellar"]})
    expect(page.locator("#transcript .mark").filter(has_text="Decided")).to_be_visible()
    camera.shoot("session")


def first_day(camera: Camera, settings: ServerSettings, directory: Path) -> None:
    """From an empty server to agents that a restart has left on disk, and to one that is away."""
    page, home = camera.page, f"http://127.0.0.1:{settings.port}"
    with server(directory, settings):
        client = Client(settings.port)
        camera.go(home)
        expect(page.locator("#first-curl")).to_be_visible()
        camera.shoot("empty")
        remember(client)
        chat(page)
        expect(page.locator("tr.agent")).to_have_count(len(TALKS) + 5)
        expect(page.locator("#sharing .row").first).to_be_visible()
        camera.shoot("agents")
        page.get_by_role("button", name="mira", exact=True).click()
        expect(page.locator("tr.opened .tree li")).to_have_count(3)
        camera.shoot("opened")
        page.get_by_role("button", name="Purge mira", exact=True).click()
        camera.shoot("question", whole=False)
        page.keyboard.press("Escape")
        camera.go(f"{home}/#sessions")
        expect(page.get_by_role("button", name="Begin")).to_be_visible()
        camera.shoot("sessions-empty")
        hold(camera, client, home)
    with server(directory, settings):
        camera.go(home)
        expect(page.locator("tr.agent").first).to_be_visible()
        camera.shoot("restarted")
    page.wait_for_selector("body[data-connection=down]")
    camera.shoot("away", whole=False)


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
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="rekindle-shots-") as name, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.browser, args=ARGUMENTS)
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        camera = Camera(page, given.folder)
        first_day(camera, ServerSettings(port=port), Path(name))
        with server(Path(name), ServerSettings(port=port, api_key="secret")):
            camera.go(f"http://127.0.0.1:{port}", state="key")
            camera.shoot("key", whole=False)
        browser.close()


if __name__ == "__main__":
    main()
