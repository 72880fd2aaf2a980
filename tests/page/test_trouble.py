"""The page in headless Chromium where something goes wrong, or is unusual: what is said, and what is kept."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page, Route, expect

from rekindle.harness.client import Client
from tests.page.conftest import AWAY, FLAGS, Open, Seen, Site, ask, site_in

FACT = "Remember that the glass lantern is in the barn."
QUESTION = "Where is the glass lantern?"
REFUSED = "Failed to load resource: the server responded with a status of 4"
CUT = """() => [...document.querySelectorAll(".figure h3, .figure .value, .figure .several > span")]
  .filter((node) => node.scrollWidth > node.clientWidth).map((node) => node.textContent)"""
IS_RIGHT_TO_LEFT = """(node) => {
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  let text = null;
  while (walker.nextNode()) text = walker.currentNode;
  const at = (index) => {
    const range = document.createRange();
    range.setStart(text, index);
    range.setEnd(text, index + 1);
    return range.getBoundingClientRect().left;
  };
  return at(0) > at(text.length - 1);
}"""


def say(site: Site, agent: str, text: str = FACT) -> None:
    Client(site.settings.port).chat([{"role": "user", "content": text}], agent=agent, max_tokens=1)


def open_row(page: Page, agent: str) -> None:
    page.get_by_role("button", name=agent, exact=True).click()


def speak_at_length(page: Page, text: str) -> None:
    """Say something of which the reply takes long; returns while it is spoken."""

    def without_an_end(route: Route) -> None:
        route.continue_(post_data={**(route.request.post_data_json or {}), "ignore_eos": True})

    page.route("**/v1/chat/completions", without_an_end)
    page.get_by_text("System prompt and sampling").click()
    page.locator("#chat-most").fill("3000")
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_an_id_that_a_browser_takes_out_of_a_path_reaches_no_other_agent(site: Site, opened: Open) -> None:
    say(site, "pin")
    page = opened(site.url)

    def of_an_older_store(route: Route) -> None:
        found = route.fetch().json()
        route.fulfill(json={**found, "agents": [{**found["agents"][0], "id": name} for name in (".", "..", "pin")]})

    page.route("**/overview", of_an_older_store)
    for name in (".", ".."):
        open_row(page, name)
        group = page.get_by_role("group", name=f"What to do with {name}", exact=True)
        expect(group.locator("button")).to_have_count(6)
        expect(group.locator("button:disabled")).to_have_count(6)
    page.get_by_role("button", name="Import").click()
    field = page.locator("#question-field")
    field.get_by_label("File").set_input_files({"name": "a.agent", "mimeType": "", "buffer": b"a"})
    field.get_by_label("Its name here").fill("..")
    page.get_by_role("dialog").get_by_role("button", name="Import").click()
    expect(page.get_by_text("..: A browser cannot send this id")).to_be_visible()


def test_a_chat_is_shown_to_its_namespace_alone(tmp_path: Path, opened: Open, seen: Seen) -> None:
    seen.pardoned = (f"{REFUSED}01",)
    (tmp_path / "keys.toml").write_text('[api_keys]\nright = "right-key"\n')
    flags = (*FLAGS, "--config", str(tmp_path / "keys.toml"))
    with site_in(tmp_path, api_key="left-key", flags=flags) as site:
        page = opened(site.url, is_up=False)
        key = page.get_by_label("API key")
        for given, others in (("left-key", 0), ("right-key", 0), ("left-key", 1)):
            key.fill(given)
            page.keyboard.press("Enter")
            page.wait_for_selector("body[data-connection=up]")
            expect(page.locator("#chat-log .user")).to_have_count(others)
            if given == "left-key" and not others:
                ask(page, FACT)
            page.get_by_role("button", name="Change key").click()
            expect(key).to_be_focused()
            expect(key).to_have_value("")
        page.close()


def test_a_backend_that_is_away_is_said_with_its_reason(site: Site, opened: Open, seen: Seen) -> None:
    seen.pardoned = ("Failed to load resource: the server responded with a status of 503",)
    page = opened(site.url)
    health = {"status": "unavailable", "running": 0, "waiting": 0, "process": 1, "problems": ["llama-server is away."]}
    page.route("**/health/ready", lambda route: route.fulfill(status=503, json=health))
    page.wait_for_selector("body[data-connection=degraded]")
    expect(page.locator("#notice")).to_have_text("llama-server is away.")
    expect(page.locator("#status")).to_have_text("pocket · unavailable")


def test_sampling_that_cannot_be_sent_is_shown(site: Site, opened: Open) -> None:
    page = opened(site.url)
    for heat in ("3", "0.75"):
        details = page.locator("#chat-form details")
        details.evaluate("node => (node.open = true)")
        page.get_by_label("Temperature").fill(heat)
        details.evaluate("node => (node.open = false)")
        page.get_by_label("Message", exact=True).fill(FACT)
        page.get_by_role("button", name="Send").click()
        if heat == "3":
            expect(page.get_by_label("Temperature")).to_be_focused()
            expect(page.get_by_label("Temperature")).to_be_visible()
    page.locator("#chat-log .assistant .outcome").wait_for()


def test_an_export_that_is_refused_says_why(site: Site, opened: Open, seen: Seen) -> None:
    seen.pardoned = (f"{REFUSED}04",)
    say(site, "leaver")
    page = opened(site.url)
    open_row(page, "leaver")
    export = page.get_by_role("button", name="Export leaver")
    page.route("**/overview", lambda route: route.abort())  # so that the row stays
    seen.pardoned = (*seen.pardoned, *AWAY)
    Client(site.settings.port).json("DELETE", "/v1/agents/leaver")
    export.click()
    expect(page.locator("#agents-said.error")).to_contain_text("leaver: ")


def test_a_reload_in_a_reply_loses_no_words(site: Site, opened: Open) -> None:
    page = opened(site.url)
    speak_at_length(page, FACT)
    page.get_by_role("button", name="Stop").wait_for()
    page.reload()
    page.wait_for_selector("body[data-connection=up]")
    expect(page.locator("#chat-log .user")).to_contain_text(FACT)
    expect(page.locator("#chat-log .error")).to_have_count(0)


def test_a_reply_that_breaks_off_keeps_what_came(tmp_path: Path, opened: Open, seen: Seen) -> None:
    seen.pardoned = AWAY
    with site_in(tmp_path) as site:
        page = opened(site.url)
        speak_at_length(page, FACT)
        expect(page.locator("#chat-log .is-speaking .text")).not_to_be_empty()
        assert site.process is not None
        site.process.kill()
        expect(page.locator("#chat-log .error")).to_contain_text("broke off")
        expect(page.locator("#chat-log .assistant .text")).not_to_be_empty()
        expect(page.locator("#chat-log .user")).to_contain_text(FACT)
        page.close()


def test_what_came_of_a_deed_is_seen_and_the_focus_stays(site: Site, opened: Open, seen: Seen) -> None:
    seen.pardoned = (REFUSED,)
    for number in range(12):
        say(site, f"row/{number:02}", "Hello.")
    page = opened(site.url, width=400)
    open_row(page, "row/10")
    page.get_by_role("button", name="Fork row/10", exact=True).click()
    page.get_by_label("Its name").fill("row/11")
    page.get_by_role("dialog").get_by_role("button", name="Fork").click()
    expect(page.locator("#agents-said.error")).to_contain_text("row/11")
    expect(page.locator("#agents-said")).to_be_in_viewport(ratio=1)
    page.get_by_role("button", name="Purge row/10", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Purge").click()
    expect(page.get_by_role("button", name="row/11", exact=True)).to_be_focused()


def test_another_agent_is_not_offered_in_a_reply(site: Site, opened: Open) -> None:
    say(site, "beside")
    page = opened(site.url)
    other = page.get_by_role("button", name="Chat with beside")
    expect(other).to_be_enabled()
    page.get_by_label("Message", exact=True).fill(FACT * 150)
    page.keyboard.press("Enter")
    expect(other).to_be_disabled()
    page.get_by_role("button", name="Stop").dispatch_event("click")  # at once, while the page still moves
    expect(other).to_be_enabled()


def test_no_figure_is_cut_off(site: Site, opened: Open) -> None:
    client = Client(site.settings.port)
    talk = [{"role": "user", "content": FACT * 20}]
    for words in (FACT * 20, FACT * 20, FACT * 10 + QUESTION * 10):
        client.chat([{"role": "user", "content": words}], agent="figures", max_tokens=1)
    client.chat([*talk, {"role": "user", "content": QUESTION}], agent="figures", max_tokens=1)
    for width in (1400, 1024, 700, 320):
        page = opened(site.url, width=width)
        expect(page.locator(".figure .several > span")).not_to_have_count(0)
        assert page.evaluate(CUT) == [], width
        page.close()


def test_text_runs_in_its_own_direction(site: Site, opened: Open) -> None:
    page = opened(site.url)
    name, text = "שלום mill", "שלום לך abc"
    chat = [{"role": "user", "content": text}, {"role": "assistant", "content": text, "facts": {}}]
    ask(page, "Hello.", agent=name)
    page.evaluate(
        "([name, chat]) => { for (const key of Object.keys(sessionStorage)) "
        "sessionStorage.setItem(key, JSON.stringify({ [name]: chat })); }",
        [name, chat],
    )
    page.reload()
    page.wait_for_selector("body[data-connection=up]")
    page.get_by_role("button", name=f"Chat with {name}").click()
    for place in ("#chat-log .user", "#chat-log .assistant .text p", f"#agent-rows button[title='{name}']"):
        assert page.locator(place).first.evaluate(IS_RIGHT_TO_LEFT), place
    for field in ("#chat-agent", "#chat-text", "#chat-system"):
        page.locator(field).evaluate("(node, text) => (node.value = text)", text)
        assert page.locator(field).evaluate("node => getComputedStyle(node).direction") == "rtl", field


def test_a_long_name_is_cut_between_characters(site: Site, opened: Open) -> None:
    face = "\U0001f600"
    page = opened(site.url)
    ask(page, "Hello.", agent=face * 40)
    expect(page.locator("#agent-rows .name button").filter(has_text=face)).to_have_text(face * 19 + "…")
