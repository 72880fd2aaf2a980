"""Markdown on the page: what becomes an element, what stays text, and that no text takes long or brings HTML in."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.page.conftest import Site

SHOWN = """async (texts) => {
  const { render } = await import("/page/markdown.js");
  const node = document.createElement("div");
  for (const text of texts) render(node, text);
  return node.innerHTML;
}"""
CASES = {
    "two words": "<p>two words</p>",
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "**bold**, *it* and _it_, ~~gone~~, `a*b*c`": (
        "<p><strong>bold</strong>, <em>it</em> and <em>it</em>, <s>gone</s>, <code>a*b*c</code></p>"
    ),
    "***both*** and **a *b* c**": "<p><strong><em>both</em></strong> and <strong>a <em>b</em> c</strong></p>",
    "snake_case_name, 2 * 3 * 4, 5*6, **, *open": "<p>snake_case_name, 2 * 3 * 4, 5*6, **, *open</p>",
    r"\*not\* `` a`b ``": "<p>*not* <code>a`b</code></p>",
    "# Title\n### Smaller ###\ntext": "<h3>Title</h3><h5>Smaller</h5><p>text</p>",
    "```python\nif a < b:\n    **c**\n```\nafter": (
        '<pre tabindex="0"><code>if a &lt; b:\n    **c**</code></pre><p>after</p>'
    ),
    "~~~\nopen": '<pre tabindex="0"><code>open</code></pre>',
    "- a\n- b\n  - c\n  - d\n- e": "<ul><li>a</li><li>b<ul><li>c</li><li>d</li></ul></li><li>e</li></ul>",
    "3. a\n4. b\n\n   more": '<ol start="3"><li>a</li><li>b<p>more</p></li></ol>',
    "1. a\n\n2. b\n\ntext": "<ol><li>a</li><li>b</li></ol><p>text</p>",
    "> quoted\n> - item\n\n---": "<blockquote><p>quoted</p><ul><li>item</li></ul></blockquote><hr>",
    "| a | b |\n|---|:-:|\n| 1 | **2** |\n| x\\|y |": (
        "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td><strong>2</strong></td></tr>"
        "<tr><td>x|y</td><td></td></tr></tbody></table>"
    ),
    "a | b\nno table": "<p>a | b\nno table</p>",
}
LINK = 'target="_blank" rel="noopener noreferrer nofollow"'
LINKS = {
    "[a *b*](https://x.example/y?z=1)": f'<p><a href="https://x.example/y?z=1" {LINK}>a <em>b</em></a></p>',
    "see https://x.example/y.": f'<p>see <a href="https://x.example/y" {LINK}>https://x.example/y</a>.</p>',
    "![picture](http://x.example/p.png)": f'<p>!<a href="http://x.example/p.png" {LINK}>picture</a></p>',
    "[a](javascript:alert(1)) [b](data:text/html,x)": "<p>[a](javascript:alert(1)) [b](data:text/html,x)</p>",
}
HTML = {
    "<b>x</b> & <img src=x onerror=alert(1)>": "<p>&lt;b&gt;x&lt;/b&gt; &amp; &lt;img src=x onerror=alert(1)&gt;</p>",
    "<script>alert(1)</script>": "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>",
    '[a](https://x.example/" onclick="alert(1))': (f'<p><a href="https://x.example/&quot;" {LINK}>a</a>)</p>'),
}
SIGNS = (
    "*a _b ",
    "[a](",
    "`a ``b ",
    "> > ",
    "- ",
    "|a",
    "**a*",
    "~~~x",
    "  - a\n    - b\n",
    "1. a\n\n",
    "[[[[",
    "h",
    "#",
)
BLANKS = " " * 200_000
LONG = {
    **{sign: sign * (60_000 // len(sign)) for sign in SIGNS},
    "links that are not closed, and a bracket": "[a](" * 15_000 + ")",
    "a span of blanks": f"`{BLANKS}`",
    "a heading of blanks": f"# {BLANKS}x",
    "a fence that is none": f"```{BLANKS}a`",
    "a line of blanks under a table's": f"a|b\n{BLANKS}-x",
    "an address of signs": "https://" + "!" * 200_000 + "x" + "!" * 200_000,
}


@pytest.fixture(scope="module")
def page(browser: Browser, site: Site) -> Iterator[Page]:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(site.url)
        yield page


@pytest.mark.parametrize("text", [*CASES, *LINKS, *HTML])
def test_a_text_as_elements(page: Page, text: str) -> None:
    assert page.evaluate(SHOWN, [text]) == {**CASES, **LINKS, **HTML}[text]


def test_a_reply_that_grows_ends_as_one_that_is_shown_at_once(page: Page) -> None:
    text = "\n\n".join(CASES)
    grown = [text[:end] for end in range(0, len(text), 3)] + [text]
    assert page.evaluate(SHOWN, grown) == page.evaluate(SHOWN, [text])


def test_blocks_that_are_complete_stay_the_same_elements(page: Page) -> None:
    same = """async () => {
      const { render } = await import("/page/markdown.js");
      const node = document.createElement("div");
      render(node, "# a\\n\\n- b");
      const [title, list] = node.children;
      render(node, "# a\\n\\n- b\\n- c");
      return [title === node.children[0], list === node.children[1], node.childElementCount];
    }"""
    assert page.evaluate(same) == [True, False, 2]


@pytest.mark.parametrize("name", LONG)
def test_no_text_makes_the_page_hang(page: Page, name: str) -> None:
    """The browser ends a script after this time: these texts take a second at most, or, where time grows with the
    square of their length, minutes."""
    page.evaluate("async () => { window.markdown = await import('/page/markdown.js'); }")
    script = (
        f"{{ const node = document.createElement('div'); markdown.render(node, {json.dumps(LONG[name])}); 'done'; }}"
    )
    browser = page.context.new_cdp_session(page)
    ended = browser.send("Runtime.evaluate", {"expression": script, "timeout": 30_000})
    assert ended["result"].get("value") == "done", ended
