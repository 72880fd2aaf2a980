"""Measure the code itself: `python -m tools.house`, as a table in Markdown.

Lines and files of the core and of the wheels, settings, how far a fact is spread, and what a warm request runs through:
the files and calls of ours between the second turn of a chat and the end of its reply, traced in a server in process.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
CORE = ROOT / "src" / "rekindle"
OURS = (f"{ROOT}/src/", f"{ROOT}/packages/")
TALK = [{"role": "user", "content": "Remember that the copper key is in the attic."}]
MORE = {"role": "user", "content": "Where is the copper key?"}
SHORT, LONG = 8, 24  # tokens of two replies, whose difference is what tokens cost


class Trace:
    """Counts the calls of our functions, by thread and by file, while it is on; threads must start after it."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self._is_on = False
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_on and event == "call" and (path := frame.f_code.co_filename).startswith(OURS):
            self.calls[threading.current_thread().name, path] += 1

    @contextmanager
    def on(self) -> Iterator[Counter[tuple[str, str]]]:
        """Count within this context."""
        self.calls = Counter()
        self._is_on = True
        try:
            yield self.calls
        finally:
            self._is_on = False


async def traced(trace: Trace) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """The calls of two warm requests, of SHORT and LONG tokens."""
    from rekindle import Engine
    from rekindle.server.app import create_app

    engine = Engine.from_pretrained(store="off", threads=1, hot_bytes="64MiB")
    with engine, closing(create_app(engine, engine.settings.server)) as app:
        transport = httpx.ASGITransport(app)
        found = []
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            for agent, tokens in (("a", SHORT), ("b", LONG)):
                talk = list(TALK)
                await reply(client, agent, talk, SHORT)
                talk.append(MORE)
                await asyncio.to_thread(engine.flush)
                with trace.on() as calls:
                    await reply(client, agent, talk, tokens)
                found.append(calls)
    return found[0], found[1]


async def reply(client: httpx.AsyncClient, agent: str, talk: list[dict[str, str]], tokens: int) -> None:
    """Ask for exactly so many tokens, and add the reply to the talk."""
    body = {"messages": talk, "temperature": 0, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
    answer = await client.post("/v1/chat/completions", json=body, headers={"X-Agent-ID": agent})
    answer.raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] == tokens
    talk.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})


def request_rows() -> Iterator[tuple[str, str]]:
    """Files of a warm request, and calls for each decoded token."""
    short, long = asyncio.run(traced(Trace()))
    yield "files of ours that a warm chat runs through", str(len({path for _, path in short}))
    yield "calls of ours in it", f"{sum(short.values()):,}"
    for thread, name in (("rekindle-engine", "the engine's thread"), ("MainThread", "the event loop")):
        more = sum(long[key] - short[key] for key in long | short if key[0] == thread)
        yield f"calls for each decoded token on {name}", f"{more / (LONG - SHORT):.0f}"


def texts(folder: Path) -> dict[Path, str]:
    """The text of each Python file below a folder."""
    return {path: path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}


def size_rows() -> Iterator[tuple[str, str]]:
    """Lines, files, settings, and how many files name one fact."""
    from rekindle.config import SETTINGS

    core = texts(CORE)
    lines = [text.count("\n") for text in core.values()]
    yield "lines of Python in src/rekindle", f"{sum(lines):,}"
    yield "files", str(len(lines))
    yield "median file", f"{statistics.median(line for line in lines if line > 1):.0f} lines"
    yield "folders at the top", str(sum(path.is_dir() and any(path.glob("*.py")) for path in CORE.iterdir()))
    for package in sorted(ROOT.glob("packages/*/src/*")):
        yield f"lines in {package.name}", f"{sum(text.count(chr(10)) for text in texts(package).values()):,}"
    yield "settings", str(len(SETTINGS))
    for name, fact in (("min_p", "a sampling parameter"), ("turn_ends", "a column of the index")):
        yield f"files that name {fact} ({name})", str(sum(bool(re.search(rf"\b{name}\b", t)) for t in core.values()))


def main() -> None:
    """Print the table."""
    print("| measure | |\n|---|--:|")
    for name, value in (*size_rows(), *request_rows()):
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
