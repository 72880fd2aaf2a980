"""The table of a day: a row a client, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tools.real_clients.client import Phase
from tools.real_clients.day import Outcome
from tools.real_clients.serverlog import Request, Share, noted, refused

HEAD = (
    "client",
    "state",
    "inside a conversation",
    "resumed, git status changed",
    "new conversation, same project",
    "compaction",
    "after it",
    "shown as text, ignored, normalised",
)
MOST_WORDS = 300


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table, and below it the clients that were not tested."""
    rows = [HEAD, ("---", "---", *["--:"] * 5, "---"), *(row(each) for each in outcomes if not each.untested)]
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    untested = [f"- {each.name}: {cell(each.untested)}" for each in outcomes if each.untested]
    return "\n".join([*lines, *(["", "Not tested:", "", *untested] if untested else [])])


def row(outcome: Outcome) -> tuple[str, ...]:
    """Return the cells of one client."""
    scripted = {phase: [each for each in found if each.step] for phase, found in outcome.requests.items()}
    every_day = scripted.get("day", [])
    # Some clients begin every conversation with replies of their own making.
    least = min((each.num_replies for each in every_day), default=0)
    day = [each for each in every_day if each.num_replies > least]
    turns = " ".join(str(round(100 * each.reused_tokens / each.prompt_tokens)) for each in day)
    every = [each for found in outcome.requests.values() for each in found]
    return (
        f"{outcome.name} {outcome.version}",
        "works" if not outcome.problems else cell("; ".join(outcome.problems)),
        f"{Share.of(day)} ({turns}), {again(every_day)} again" if day else "–",
        first(scripted.get("resume", [])),
        first([each for each in scripted.get("new", ()) if each.place == 0]),
        *compaction(outcome.requests.get("compaction", ())),
        cell(", ".join([*noted(every), *recovered(outcome, every)])) or "–",
    )


def recovered(outcome: Outcome, requests: Sequence[Request]) -> list[str]:
    """Return the errors that a client that works was answered with: it has another way."""
    return [f"refused: {each}" for each in refused(requests)] if not outcome.problems else []


def first(requests: Sequence[Request]) -> str:
    """Return the share of the first request alone: the one that a person waits for."""
    return counted(requests[0]) if requests else "–"


def again(requests: Sequence[Request]) -> str:
    """Return how many tokens of prompts were computed again by the next request of their step."""
    pairs = (
        (before, each)
        for before, each in pairwise(requests)
        if (before.step, before.place + 1) == (each.step, each.place)
    )
    return f"{sum(max(0, before.prompt_tokens - each.reused_tokens) for before, each in pairs):,}"


def compaction(requests: Sequence[Request]) -> tuple[str, str]:
    """Return the share of the request that has the model summarise, the first that is no step of the script, and that
    of the next one."""
    replies = [each for each in requests if each.is_reply]
    at = next((at for at, each in enumerate(replies) if not each.step), len(replies))
    return first(replies[at:]), first(replies[at + 1 :])


def counted(request: Request) -> str:
    """Return the share of one request, with its tokens."""
    return f"{Share.of([request])} of {request.prompt_tokens:,}"


def listing(phase: Phase, requests: Sequence[Request]) -> str:
    """Return the requests of one part of the day, a line each."""
    return "\n".join(
        f"  {phase} {each.path} {each.status} {each.step or 'other'}/{each.place}"
        f" {each.reused_tokens}/{each.prompt_tokens} {each.cause} {each.error}"
        for each in requests
    )


def cell(text: str) -> str:
    """Return text as it can be in a cell: one line, bounded."""
    line = " ".join(text.replace("|", "\\|").split())
    return line if len(line) <= MOST_WORDS else f"{line[:MOST_WORDS]}…"
