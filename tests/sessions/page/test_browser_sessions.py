"""Sessions in headless Chromium against a real server process: who speaks, who hears what, whoever makes it happen."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page, expect

from rekindle.harness.client import Client
from tests.page.conftest import AWAY, Open, Seen, Site

ROOT = "/v1/coordination/sessions"
PLAN = {
    "title": "The harbour committee",
    "setting": "The keepers of a small harbour town share what they know. The copper key is in the attic.",
    "agents": [{"name": "Ada", "role": "archivist"}, {"name": "Bo"}, {"name": "Cy"}],
    "opening": "Where is the copper key?",
    "sampling": {"max_tokens": 24, "temperature": 0},
}


def post(site: Site, path: str, body: Any) -> Any:
    with Client(site.settings.port).send("POST", ROOT + path, body, {}) as response:
        return json.loads(response.read())


def begin(site: Site, **changes: Any) -> str:
    """A new session; its id."""
    made: str = post(site, "", {**PLAN, **changes})["id"]
    return made


def said(page: Page, number: int) -> Any:
    """The row of an utterance."""
    return page.locator(f"[data-key='said {number}']")


def test_without_sessions_it_says_how_to_begin(site: Site, opened: Open) -> None:
    page = opened(site.url, "/#sessions")
    expect(page.locator("#session-curl")).to_contain_text(f"curl {site.url}{ROOT}")
    expect(page.get_by_role("button", name="Begin")).to_be_visible()
    page.get_by_text("New session").click()
    with page.expect_response("**/sessions"):
        pass
    expect(page.get_by_role("button", name="Begin")).to_be_hidden()
    begin(site)
    page.get_by_role("link", name="The harbour committee").click()
    expect(page.get_by_role("heading", name="The harbour committee")).to_be_visible()
    expect(page.locator("#no-sessions")).to_be_hidden()


def test_a_session_is_begun_and_steered_on_the_page(site: Site, opened: Open, seen: Seen) -> None:
    seen.pardoned = ("Failed to load resource: the server responded with a status of 400",)
    begin(site)
    page = opened(site.url, "/#sessions")
    page.get_by_text("New session").click()
    page.get_by_label("Who takes part, separated by commas").fill("Ada")
    page.get_by_label("Tokens of a turn").fill("8")
    page.get_by_role("button", name="Begin").click()
    expect(page.locator("#new-error")).to_contain_text("2 to 30")
    page.get_by_label("Who takes part, separated by commas").fill("Ada, Bo,")
    page.get_by_label("The first message").fill("Where is the copper key?")
    page.get_by_label("Who speaks").select_option("a moderator picks")
    page.get_by_label("Title, for people").fill("Begun here")
    page.get_by_role("button", name="Begin").click()
    expect(page.get_by_role("heading", name="Begun here")).to_be_visible()
    expect(said(page, 0)).to_contain_text("Where is the copper key?")
    page.get_by_role("button", name="Next turn").click()
    expect(said(page, 1)).to_be_visible()


def test_a_round_is_followed_with_what_each_turn_reused(site: Site, opened: Open) -> None:
    page = opened(site.url, f"/#sessions/{begin(site)}")
    expect(said(page, 0)).to_contain_text("Where is the copper key?")
    expect(page.locator("#live-next")).to_have_text("Next: Ada")
    page.get_by_role("button", name="Round").click()
    expect(page.locator("#transcript .mark")).to_contain_text("Round 1: 3 turns")
    for number, name in enumerate(("Ada", "Bo", "Cy"), start=1):
        row = said(page, number)
        expect(row.locator(".by")).to_have_text(name)
        expect(row.locator(".facts")).to_contain_text("reused")
        expect(row.locator(".speaks")).to_have_attribute("title", name)
        expect(row.locator(".hears")).to_have_count(2)
    expect(said(page, 2).locator(".facts")).to_contain_text("gap ")
    said(page, 2).get_by_text("Receipt").click()
    expect(said(page, 2).locator(".receipt")).to_contain_text("computed from token")
    expect(said(page, 0).get_by_text("Receipt")).to_have_count(0)
    expect(page.get_by_role("button", name="Next turn")).to_be_enabled()


def test_a_whisper_is_drawn_in_one_lane(site: Site, opened: Open) -> None:
    page = opened(site.url, f"/#sessions/{begin(site)}")
    expect(said(page, 0)).to_be_visible()
    page.get_by_label("Put in a message").fill("The code is 4821.")
    page.get_by_label("to", exact=True).select_option("Bo")
    page.get_by_role("button", name="Tell").click()
    row = said(page, 1)
    expect(row).to_contain_text("to Bo alone")
    expect(row.locator(".hears")).to_have_count(1)
    expect(row.locator(".hears")).to_have_attribute("title", "Bo")
    expect(page.get_by_label("Put in a message")).to_have_value("")


def test_what_others_make_happen_is_shown_too(site: Site, opened: Open) -> None:
    session = begin(site, title="From elsewhere")
    page = opened(site.url, f"/#sessions/{session}")
    expect(said(page, 0)).to_be_visible()
    (turn,) = post(site, f"/{session}/turn", {"speaker": "Cy"})["turns"]
    row = said(page, 1)
    expect(row).to_contain_text(turn["text"])
    expect(row.locator(".facts")).to_contain_text("reused")
    post(site, f"/{session}/agents/Cy/fork", {"target": "Dee"})
    page.get_by_role("button", name="Next turn").click()
    expect(page.locator("#lanes")).to_contain_text("Dee")


def test_the_list_keeps_up_with_the_session_beside_it(site: Site, opened: Open) -> None:
    session = begin(site, title="Kept up with")
    with Client(site.settings.port).send("GET", ROOT, None, {}) as response:
        before = json.loads(response.read())
    page = opened(site.url, f"/#sessions/{session}")
    row = page.locator(f"#sessions [data-key='{session}']")
    expect(row).to_contain_text("0 turns")
    page.route(site.url + ROOT, lambda route: route.fulfill(json=before))  # the list is asked for too seldom to tell
    post(site, f"/{session}/round", {})
    expect(page.locator("#live-sum")).to_contain_text("3 turns")
    expect(row).to_contain_text("3 turns")
    expect(row.locator("a")).to_have_attribute("aria-current", "true")


def test_a_vote_shows_its_outcome(site: Site, opened: Open) -> None:
    session = begin(site, title="A vote")
    page = opened(site.url, f"/#sessions/{session}")
    expect(said(page, 0)).to_be_visible()
    run = post(site, f"/{session}/vote", {"question": "Where is the copper key?", "options": ["attic", "cellar"]})
    expect(page.locator("#transcript .mark").filter(has_text="Decided")).to_contain_text(
        f"Decided: {run['decision']['outcome'] or 'nothing'}"
    )


def test_refusals_are_said(site: Site, opened: Open, seen: Seen) -> None:
    seen.pardoned = ("Failed to load resource: the server responded with a status of 404",)
    page = opened(site.url, "/#sessions/nobody")
    expect(page.locator("#live-error")).to_contain_text("nobody")


def test_a_session_goes_on_after_a_restart(site: Site, opened: Open, seen: Seen) -> None:
    seen.pardoned = AWAY
    session = begin(site, title="It lasts")
    page = opened(site.url, f"/#sessions/{session}")
    page.get_by_role("button", name="Next turn").click()
    expect(said(page, 1)).to_contain_text("reused")
    site.stop()
    page.wait_for_selector("body[data-connection=down]")
    page.get_by_role("button", name="Next turn").click()
    expect(page.locator("#live-error")).not_to_be_empty()
    site.start()
    page.wait_for_selector("body[data-connection=up]")
    expect(page.locator("#live-error")).to_be_empty()
    page.get_by_role("button", name="Next turn").click()
    expect(said(page, 2).locator(".by")).to_have_text("Bo")
    expect(said(page, 2).locator(".facts")).to_contain_text("reused")


def test_turns_that_were_spoken_before_have_their_figures(site: Site, opened: Open) -> None:
    session = begin(site, title="Before")
    post(site, f"/{session}/round", {})
    page = opened(site.url, f"/#sessions/{session}")
    expect(said(page, 1).locator(".facts")).to_contain_text("reused")
    expect(said(page, 3).locator(".facts")).to_contain_text("gap ")
    expect(said(page, 0).locator(".facts")).to_have_count(0)
