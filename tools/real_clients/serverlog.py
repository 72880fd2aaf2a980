"""What the server's JSON log says about a client's requests, joined with the script's own record of its replies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

NO_STEP = {"step": "", "place": 0, "replies": 0}


@dataclass(frozen=True, slots=True)
class Request:
    """One request that was logged; `step` and `place` of the reply it got, empty for one outside the script."""

    path: str
    status: int
    prompt_tokens: int = 0
    reused_tokens: int = 0
    step: str = ""
    place: int = 0
    num_replies: int = 0  # in the history that was sent
    cause: str = ""
    error: str = ""
    notes: tuple[str, ...] = ()  # left out, ignored, normalised
    number: int = -1  # in the script's record, where that counts
    first_token_ms: float = 0.0

    @property
    def is_reply(self) -> bool:
        """Whether the model replied."""
        return self.prompt_tokens > 0


def read_requests(log: str, asked: str) -> list[Request]:
    """Read the lines of a server's log and of `scripted_serve`'s record; other lines are skipped.

    A reply's step is that of the first line of the record with its number of prompt tokens that no other reply has.
    """
    steps = [json.loads(line) for line in asked.splitlines()]
    found = []
    for line in log.splitlines():
        entry = json.loads(line) if line.startswith("{") else {}
        if entry.get("event") != "request" or not isinstance(entry.get("path"), str):
            continue
        step = next((each for each in steps if each["prompt_tokens"] == entry.get("prompt_tokens")), None)
        if step is not None:
            steps.remove(step)
        found.append(_request(entry, step or NO_STEP))
    return found


def _request(entry: dict[str, Any], step: dict[str, Any]) -> Request:
    notes = [f"{kind} shown as text" for kind in entry.get("left_out") or {}]
    notes += [f"`{name}` ignored" for name in entry.get("ignored") or ()]
    notes += [f"{kind} normalised" for kind in entry.get("normalised") or {}]
    return Request(
        path=entry["path"],
        status=int(entry["status"] or 0),
        prompt_tokens=entry.get("prompt_tokens") or 0,
        reused_tokens=entry.get("reused_tokens") or 0,
        step=step["step"],
        place=step["place"],
        num_replies=step["replies"],
        cause=entry.get("cause") or "",
        error=entry.get("error") or "",
        notes=tuple(notes),
        number=step.get("number", -1),
        first_token_ms=entry.get("first_token_ms") or 0.0,
    )


@dataclass(frozen=True, slots=True)
class Share:
    """Prompt tokens reused, of all."""

    reused: int
    prompt: int

    @classmethod
    def of(cls, requests: Iterable[Request]) -> Share:
        """Return the share of these requests together."""
        replies = [each for each in requests if each.is_reply]
        return cls(sum(each.reused_tokens for each in replies), sum(each.prompt_tokens for each in replies))

    def __str__(self) -> str:
        return f"{100 * self.reused / self.prompt:.1f} %" if self.prompt else "–"


def noted(requests: Iterable[Request]) -> list[str]:
    """Return what was left out, ignored or normalised in any of them, the most frequent first."""
    return [note for note, _ in Counter(note for each in requests for note in each.notes).most_common()]


def refused(requests: Iterable[Request]) -> list[str]:
    """Return the errors that requests were answered with, each once."""
    return list(dict.fromkeys(f"{each.path}: {each.status} {each.error}" for each in requests if each.status >= 400))


def missing(requests: Sequence[Request], steps: dict[str, int]) -> list[str]:
    """Return the replies that were never asked for; `steps` are numbers of replies by step."""
    seen = {(each.step, each.place) for each in requests}
    return [f"{name}/{place}" for name, count in steps.items() for place in range(count) if (name, place) not in seen]
