"""What a session computed with Rekindle and without, by its parts, and the turns that computed more than was new."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.real_clients.replay import Words
from tools.real_clients.session import TURNS, Turn, read
from tools.real_clients.work import PARTS

REKINDLE = TURNS.removesuffix(".json")
ARMS = {REKINDLE: "Rekindle", "ids": "llama-server, the same ids", "requests": "llama-server, the client's requests"}
HEAD = ("client", "before these turns", "turns", "prompt tokens", "new", *ARMS.values())
MOST_MORE = 64  # tokens beyond the new ones: less than a block and a little


@dataclass(frozen=True, slots=True)
class Asked:
    """One turn of the script: its number among all replies, its step, new tokens of its prompt, tokens of the reply
    before it."""

    number: int
    step: str
    place: int
    prompt: int
    new: int
    said: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """A session of one client: its turns, and what each arm did in those that it ran, by their numbers."""

    name: str
    asked: Sequence[Asked]
    arms: Mapping[str, Mapping[int, Turn]]

    @classmethod
    def read(cls, name: str, directory: Path) -> Comparison:
        """Read what a session and its replays have written."""
        words = Words.read(directory)
        lines = map(json.loads, (directory / "asked.jsonl").read_text("utf-8").splitlines())
        asked: list[Asked] = []
        before = Words((), ())
        for line in lines:
            if line["step"]:
                each = words[line["number"]]
                new, size = each.num_new(before), len(each.prompt)
                asked.append(Asked(line["number"], line["step"], line["place"], size, new, len(before.reply)))
                before = each
        arms = {arm: {number: Turn(**turn) for number, turn in read(directory / f"{arm}.json").items()} for arm in ARMS}
        return cls(name, asked, arms)

    def computed(self, arm: str, asked: Asked) -> int | None:
        """Return the prompt tokens that an arm computed in a turn, those of the reply before it left out where the arm
        did not say it; None if it did not run the turn."""
        turn = self.arms[arm].get(asked.number)
        if turn is None or not turn.prompt:
            return None
        return turn.computed if arm != "requests" else max(0, turn.computed - asked.said)

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row for each part, and one for all."""
        parts = [(part.after or "the first", [each for each in self.asked if each.step == part.step]) for part in PARTS]
        parts = [*parts, ("all", list(self.asked))]
        return [(self.name, after, *self._cells(found)) for after, found in parts if found]

    def _cells(self, asked: Sequence[Asked]) -> tuple[str, ...]:
        sums = (sum(each.prompt for each in asked), sum(each.new for each in asked))
        return (str(len(asked)), *(f"{each:,}" for each in sums), *(self._cell(arm, asked) for arm in ARMS))

    def _cell(self, arm: str, asked: Sequence[Asked]) -> str:
        """Return tokens computed, the share reused, the median and the longest wait, of an arm that ran these turns."""
        ran = [(each, found) for each in asked if (found := self.computed(arm, each)) is not None]
        if not ran:
            return "–"
        prompt, computed = sum(self.arms[arm][each.number].prompt for each, _ in ran), sum(found for _, found in ran)
        seconds = [self.arms[arm][each.number].first_token_s for each, _ in ran]
        some = "" if len(ran) == len(asked) else f" in {len(ran)} turns"
        waits = f"{statistics.median(seconds):.1f} s, at most {max(seconds):.0f}"
        return f"{computed:,}{some}, {100 * (1 - computed / prompt):.1f} %, {waits}"

    def more(self) -> list[str]:
        """Return the turns in which Rekindle computed more than was new."""
        found = []
        for each in self.asked:
            computed = self.computed(REKINDLE, each)
            if computed is not None and computed > each.new + MOST_MORE:
                cause = self.arms[REKINDLE][each.number].cause
                found.append(f"{self.name}: {each.step}/{each.place} computed {computed:,}, {each.new:,} new: {cause}")
        return found


def table(comparisons: Sequence[Comparison]) -> str:
    """Return the table of all sessions in Markdown, and below it the turns that computed more than was new."""
    lines = [HEAD, ("---", "---", *["--:"] * (len(HEAD) - 2)), *(row for each in comparisons for row in each.rows())]
    more = [f"- {line}" for each in comparisons for line in each.more()]
    return "\n".join([*("| " + " | ".join(cells) + " |" for cells in lines), "", *more])
