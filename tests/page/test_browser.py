"""The page in headless Chromium against a real server process: what a person sees, types and hears."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from rekindle.harness.client import Client
from tests.page.conftest import AWAY, FLAGS, Open, Seen, Site, ask, site_in

FACT = "Remember that the glass lantern is in the barn."
QUESTION = "Where is the glass lantern?"
OUTLINE = "getComputedStyle(document.activeElement).outlineStyle"
SHIFTS = """() => new Promise((resolve) => {
  let sum = 0;
  const add = (entries) => entries.forEach((entry) => (sum += entry.value));
  const observer = new PerformanceObserver((list) => add(list.getEntries()));
  observer.observe({ type: "layout-shift", buffered: true });
  requestAnimationFrame(() => requestAnimationFrame(() => { add(observer.takeRecords()); resolve(sum); }));
})"""


def row(page: Page, agent: str) -> Locator:
    """An agent's row. The page asks for it when an answer is through, so what it says of that answer comes later."""
    return page.locator("tr.agent", has=page.get_by_role("button", name=agent, exact=True))


def picture(page: Page) -> np.ndarray:
    """What the page looks like, [height, width, 3]."""
    return np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))


def press_until(page: Page, selector: str, *, key: str = "Tab") -> None:
    """Press a key until the focus is where it should be; wherever it comes through, it is seen."""
    for _ in range(100):
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
        page.keyboard.press(key)
        assert page.evaluate(OUTLINE) != "none", page.evaluate("document.activeElement.outerHTML")
    raise AssertionError(f"{selector} is not reached with {key}")


def test_an_empty_server_says_how_to_begin_and_an_agent_appears(tmp_path: Path, opened: Open, seen: Seen) -> None:
    with site_in(tmp_path) as site:
        page = opened(site.url)
        expect(page.locator("#first-curl")).to_contain_text(f"curl {site.url}/v1/chat/completions")
        expect(page.locator("#agents")).to_be_hidden()
        ask(page, FACT, agent="ada")
        expect(page.locator("#chat-log .assistant")).to_contain_text("miss reused 0 of")
        ask(page, QUESTION)
        expect(page.locator("#chat-log .assistant").last).to_contain_text("extend reused")
        expect(row(page, "ada")).to_contain_text("extend")
        expect(page.locator("#no-agents")).to_be_hidden()
        expect(page.locator("#no-misses")).to_be_visible()
        expect(page.locator("#times circle")).to_have_count(2)
        page.reload()
        expect(page.locator("#chat-agent")).to_have_value("me")
        page.get_by_role("button", name="Chat with ada").click()
        expect(page.locator("#chat-log .assistant")).to_have_count(2)
        page.close()  # before the server is gone, of which it would complain


def test_a_restarted_server_is_found_again_with_its_agents_warm(tmp_path: Path, opened: Open, seen: Seen) -> None:
    seen.pardoned = AWAY
    with site_in(tmp_path, flags=(*FLAGS, "--check-restored", "1", "--block-tokens", "16")) as site:
        page = opened(site.url)
        restart_under(page, site)
        receipts_are_shown(page)


def restart_under(page: Page, site: Site) -> None:
    """The page meanwhile says that the server is away, and then what its agents have on disk."""
    ask(page, FACT * 4, agent="ada")
    expect(row(page, "ada")).to_contain_text("miss")
    site.stop()
    page.wait_for_selector("body[data-connection=down]")
    expect(page.get_by_role("alert").filter(has_text="does not answer")).to_be_visible()
    assert "miss" in row(page, "ada").inner_text(), "what was known stays on the page"
    site.start()
    page.wait_for_selector("body[data-connection=up]")
    expect(page.locator("#notice")).to_be_hidden()
    hot, warm = (page.locator(f"tr.agent td[data-label={tier}]") for tier in ("Hot", "Warm"))
    expect(hot).to_have_text("0")
    expect(warm).not_to_have_text("0")
    ask(page, QUESTION)
    expect(page.locator("#chat-log .assistant").last).to_contain_text("from disk")
    expect(warm).to_have_text("0")


def receipts_are_shown(page: Page) -> None:
    """Of the reply in the chat, and of the same request at its agent: what was read, computed and checked."""
    figure = page.get_by_role("group", name="Blocks checked", exact=True)
    expect(figure).to_contain_text(re.compile(r"[1-9]\d*all with the same bits"))
    page.get_by_role("button", name="ada", exact=True).click()
    for reply in (page.locator("#chat-log .assistant").last, page.locator("tr.opened li", has_text="extend")):
        reply.get_by_text("Receipt").click()
        receipt = reply.locator(".receipt")
        expect(receipt).to_contain_text(re.compile(r"read \d+ of \d+ tokens .*, in blocks up to [0-9a-f]{16}…"))
        expect(receipt).to_contain_text(re.compile(r"computed from token \d+ on: \d+ of the prompt, \d+ of the reply"))
        expect(receipt).to_contain_text(re.compile(r"checked: [1-9]\d* of \d+ blocks computed again"))
    page.get_by_role("button", name="Chat with ada").click()
    expect(page.locator("#chat-log .receipt").last).to_contain_text("checked: ")


def test_agents_that_begin_alike_are_drawn_in_one_colour(site: Site, opened: Open) -> None:
    page = opened(site.url)
    page.get_by_text("System prompt and sampling").click()
    page.get_by_label("System prompt of a new conversation").fill("You keep the ledger of the mill. " * 20)
    for agent in ("left", "right"):
        ask(page, f"I am {agent}.", agent=agent)
    expect(page.locator("#sharing-groups")).to_contain_text("left and right: ")
    expect(page.locator("#sharing .row")).to_have_count(2)
    page.get_by_role("button", name="left", exact=True).click()
    expect(page.locator("tr.opened")).to_contain_text("shared with right")


def test_a_prompt_that_is_being_computed_can_be_stopped(site: Site, opened: Open) -> None:
    page = opened(site.url)
    long = "The copper key is in the attic. " * 350
    page.get_by_label("Message", exact=True).fill(long)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").dispatch_event("click")  # at once, while the page still moves
    page.get_by_role("button", name="Send").wait_for()
    expect(page.get_by_label("Message", exact=True)).to_have_value(long)
    expect(page.locator("#status")).to_have_text("pocket · ready")
    ask(page, FACT)


def test_refusals_are_said_and_lose_no_words(site: Site, opened: Open, seen: Seen) -> None:
    seen.pardoned = ("Failed to load resource: the server responded with a status of 400",)
    page = opened(site.url)
    words = "key " * 9000
    page.get_by_label("Message", exact=True).fill(words)
    page.keyboard.press("Enter")
    expect(page.locator("#chat-log .error")).to_contain_text("tokens")
    expect(page.get_by_label("Message", exact=True)).to_have_value(words)


def test_ids_and_words_are_text_and_never_html(site: Site, opened: Open, seen: Seen) -> None:
    seen.pardoned = ("This document requires 'TrustedHTML' assignment",)
    page = opened(site.url)
    evil = '<img src="x" onerror="document.title=1">'
    ask(page, evil, agent=evil)
    expect(row(page, evil)).to_contain_text("<img src")
    expect(page.locator("#chat-log .user")).to_contain_text(evil)
    assert page.locator("main img").count() == 0
    with_html = "() => { try { document.body.innerHTML = '<b>'; return 'written'; } catch { return 'refused'; } }"
    assert page.evaluate(with_html) == "refused"


def test_all_of_it_is_reached_by_keyboard(site: Site, opened: Open) -> None:
    page = opened(site.url)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    press_until(page, "#chat-agent")
    page.keyboard.press("Control+A")
    page.keyboard.type("keys")
    press_until(page, "#chat-text")
    page.keyboard.type(FACT)
    page.keyboard.press("Enter")
    page.locator("#chat-log .assistant .outcome").wait_for()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    expect(row(page, "keys")).to_be_visible()
    press_until(page, "button[title=keys]", key="Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("button[title=keys]")).to_have_attribute("aria-expanded", "true")
    expect(page.locator("tr.opened")).to_contain_text("Branches")
    press_until(page, "#to-sessions", key="Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Sessions")).to_be_visible()


def test_light_and_dark_follow_the_system_until_somebody_chooses(site: Site, opened: Open) -> None:
    pictures = {scheme: picture(opened(site.url, scheme=scheme)) for scheme in ("light", "dark")}
    assert pictures["light"].mean() > 200
    assert pictures["dark"].mean() < 60
    for each in pictures.values():
        assert len(np.unique(each.reshape(-1, 3), axis=0)) > 100, "nothing is drawn"
    page = opened(site.url)
    page.get_by_role("button", name="Switch to dark").click()
    assert picture(page).mean() < 60
    page.reload()
    page.wait_for_selector("body[data-connection=up]")
    assert picture(page).mean() < 60
    expect(page.get_by_role("button", name="Switch to light")).to_be_visible()


def test_a_key_is_asked_for_and_kept_in_the_tab(tmp_path: Path, opened: Open, seen: Seen) -> None:
    seen.pardoned = ("Failed to load resource: the server responded with a status of 401",)
    with site_in(tmp_path, api_key="secret") as site:
        page = opened(site.url, is_up=False)
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_text("does not know this key")).to_be_visible()
        key.fill("secret “copied”")
        page.keyboard.press("Enter")
        expect(page.locator("#key-said")).to_contain_text("A key has no “")
        key.fill("secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("body[data-connection=up]")
        ask(page, FACT, agent="ada")
        page.reload()
        page.wait_for_selector("body[data-connection=up]")
        expect(row(page, "ada")).to_be_visible()
        assert page.evaluate("localStorage.length") == 0
        assert not [url for url in seen.urls if "secret" in url]
        page.close()  # before the server is gone, of which it would complain


def test_it_is_readable_at_400_pixels_and_nothing_jumps(site: Site, opened: Open) -> None:
    pages = {width: opened(site.url, width=width) for width in (400, 768, 1024, 1280, 1600)}
    for width, page in pages.items():  # all are open, so they wait for their next figures together
        with page.expect_response("**/overview"):
            pass
        too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(too_wide) <= 0, width
        assert page.evaluate(SHIFTS) < 0.01, width


def test_on_a_phone_an_agent_takes_three_lines_and_nothing_is_zoomed(site: Site, opened: Open) -> None:
    Client(site.settings.port).chat([{"role": "user", "content": FACT}], agent="small", max_tokens=1)
    page = opened(site.url, width=390)
    expect(row(page, "small").locator("[data-label=Tokens]")).to_be_visible()
    expect(row(page, "small").locator("[data-label=Warm]")).to_be_hidden()
    box = row(page, "small").bounding_box()
    assert box is not None and box["height"] < 110, box
    sizes = page.locator("input:visible, textarea:visible").evaluate_all(
        "nodes => nodes.map(node => parseFloat(getComputedStyle(node).fontSize))"
    )
    assert len(sizes) >= 2 and min(sizes) >= 16


def test_the_chat_is_seen_however_many_agents_there_are(site: Site, opened: Open) -> None:
    client = Client(site.settings.port)
    for number in range(14):
        client.chat([{"role": "user", "content": "Hello."}], agent=f"many/{number}", max_tokens=1)
    for width, most in ((1600, 200), (1280, 560), (400, 100)):
        page = opened(site.url, width=width)
        expect(row(page, "many/13")).to_be_visible()
        box = page.locator("section.chat").bounding_box()
        assert box is not None and box["y"] < most, (width, box)
        page.close()


def test_the_first_row_says_what_memory_holds_and_what_it_gave(site: Site, opened: Open) -> None:
    client = Client(site.settings.port)
    long = [{"role": "user", "content": "Remember the silver bell. " * 60}]
    for _ in range(2):
        client.chat(long, agent="figures", max_tokens=1)
    page = opened(site.url)

    def figure(name: str) -> Locator:
        return page.get_by_role("group", name=name, exact=True)

    expect(figure("In memory")).to_contain_text("of 64.0 MiB")
    expect(figure("On disk")).to_contain_text("iB")
    expect(figure("Reused, last hour").locator(".value")).to_have_text(re.compile(r"^\d+(\.\d)? %$"))
    expect(figure("First token, last hour")).to_contain_text(re.compile(r"exact .*ms ×\d"))
    expect(figure("Time saved today")).to_contain_text(re.compile(r"about .* s\d+,?\d* tokens reused"))
    expect(figure("Disk writes today")).to_contain_text("a turn")
    expect(figure("Now")).to_contain_text("running")
    page.set_viewport_size({"width": 1400, "height": 900})
    tops = page.locator(".figure").evaluate_all("nodes => nodes.map(node => node.getBoundingClientRect().top)")
    assert len(tops) == 8 and len(set(tops)) == 1, "one row"
    expect(page.locator("#means")).to_contain_text("exactthe prompt is stored")


def test_an_agent_is_kept_branched_carried_away_and_forgotten(site: Site, opened: Open, tmp_path: Path) -> None:
    client = Client(site.settings.port)
    talk = [{"role": "user", "content": FACT * 8}]
    talk += [{"role": "assistant", "content": client.chat(talk, agent="mill", max_tokens=4).text}]
    for question in (QUESTION, "Who owns the mill?"):
        client.chat([*talk, {"role": "user", "content": question}], agent="mill", max_tokens=4)
    page = opened(site.url)
    said = page.locator("#agents-said")

    def do(deed: str, agent: str = "mill") -> None:
        if page.get_by_role("button", name=agent, exact=True).get_attribute("aria-expanded") == "false":
            page.get_by_role("button", name=agent, exact=True).click()
        page.get_by_role("button", name=f"{deed} {agent}", exact=True).click()

    def answer(yes: str, **fields: str) -> None:
        for label, value in fields.items():
            page.locator("#question-field").get_by_label(label.replace("_", " ")).fill(value)
        page.get_by_role("dialog").get_by_role("button", name=yes).click()

    expect(row(page, "mill")).to_be_visible()
    do("Pin")
    expect(row(page, "mill")).to_contain_text("pinned")
    do("Unpin")
    expect(row(page, "mill")).not_to_contain_text("pinned")
    branches = page.locator("tr.opened .tree li")
    expect(branches).to_have_count(2)
    expect(branches.last).to_contain_text(re.compile(r"begins with \d+ of no\. 0"))
    indents = [each.evaluate("node => getComputedStyle(node).paddingLeft") for each in branches.all()]
    assert indents == ["0px", "18px"]
    do("Offload")
    expect(said).to_contain_text("mill: out of memory")
    tokens = row(page, "mill").locator("[data-label=Tokens]").inner_text()
    expect(row(page, "mill").locator("[data-label=Hot]")).not_to_have_text(tokens)
    do("Fork")
    answer("Fork", Its_name="mill/north")
    expect(row(page, "mill/north")).to_be_visible()
    do("Rewind", "mill/north")
    answer("Cancel")
    do("Rewind", "mill/north")
    answer("Rewind", Turns="1")
    expect(said).to_contain_text(re.compile(r"mill/north: \d+ tokens left"))
    with page.expect_download() as started:
        do("Export")
    assert started.value.suggested_filename == "mill.agent"
    file = tmp_path / "mill.agent"
    started.value.save_as(file)
    page.get_by_role("button", name="Import").click()
    page.locator("#question-field").get_by_label("File").set_input_files(file)
    expect(page.locator("#question-field").get_by_label("Its name here")).to_have_value("mill")
    answer("Import", Its_name_here="miller")
    expect(row(page, "miller")).to_be_visible()
    do("Purge")
    expect(page.get_by_role("dialog")).to_contain_text("Forget mill for good?")
    expect(page.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(row(page, "mill")).to_be_visible()
    do("Purge")
    answer("Purge")
    expect(said).to_contain_text(re.compile(r"mill: purged: .*others share"))
    expect(row(page, "mill")).to_be_hidden()
    assert {each["id"] for each in client.json("GET", "/v1/agents")["data"]} >= {"mill/north", "miller"}


def test_a_deed_that_is_refused_says_why(site: Site, opened: Open, seen: Seen) -> None:
    seen.pardoned = ("Failed to load resource: the server responded with a status of 4",)
    client = Client(site.settings.port)
    for agent in ("one", "two"):
        client.chat([{"role": "user", "content": FACT}], agent=agent, max_tokens=1)
    page = opened(site.url)
    page.get_by_role("button", name="one", exact=True).click()
    page.get_by_role("button", name="Fork one", exact=True).click()
    page.get_by_label("Its name").fill("two")
    page.get_by_role("dialog").get_by_role("button", name="Fork").click()
    expect(page.locator("#agents-said.error")).to_contain_text("two")


def test_replies_are_shown_as_markdown(site: Site, opened: Open) -> None:
    page = opened(site.url)
    chat = [{"role": "user", "content": "**plain**"}, {"role": "assistant", "content": "**bold**", "facts": {}}]
    page.evaluate("chats => sessionStorage.setItem('rekindle-chats default', chats)", json.dumps({"me": chat}))
    page.reload()
    page.wait_for_selector("body[data-connection=up]")
    expect(page.locator("#chat-log .user")).to_have_text("You: **plain**")
    expect(page.locator("#chat-log .assistant strong")).to_have_text("bold")
