"""Results of agents' sessions: silence between speakers and computed tokens, as tables and measurements. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from rekindle_lab.plot import pyplot
from rekindle_lab.record import Measurement

BOUND_STEPS, BOUND_MS = 2, 10.0
WANTED_SHARE = 0.98


@dataclass(frozen=True, slots=True)
class Spoken:
    """One turn. `gap_ms`: from the last word of the previous turn to its first; None for the first of a session.

    `begins`: it begins a round, so its gap is between the last seat and the first and includes the end of a round.
    `taken_in_tokens` were prefilled for its speaker while others spoke. `token_ms`: median time between its tokens.
    `first_token_ms`: from the turn's start to its first token. `warm_tokens` of the reused ones came from disk.
    """

    round: int
    speaker: str
    gap_ms: float | None
    prompt_tokens: int
    reused_tokens: int
    taken_in_tokens: int
    num_tokens: int
    token_ms: float | None
    timings: Mapping[str, float]
    begins: bool = False
    first_token_ms: float | None = None
    warm_tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens computed during the turn itself."""
        return self.prompt_tokens - self.reused_tokens


@dataclass(frozen=True, slots=True)
class Played:
    """One arm: its turns in order, seconds per round, milliseconds of decode steps of one stream alone."""

    arm: str
    turns: tuple[Spoken, ...]
    walls_s: tuple[float, ...]
    steps_ms: tuple[float, ...]

    @property
    def step_ms(self) -> float:
        """The median decode step of one stream alone."""
        return statistics.median(self.steps_ms)

    @property
    def bound_ms(self) -> float:
        """The bound on the silence between two speakers."""
        return BOUND_STEPS * self.step_ms + BOUND_MS

    @property
    def gaps_ms(self) -> list[float]:
        """The silences between two speakers of a round."""
        return gaps(self.turns)

    @property
    def is_met(self) -> bool | None:
        """Whether the median silence is within the bound; None if there is no silence between two speakers."""
        found = self.gaps_ms
        return statistics.median(found) <= self.bound_ms if found else None

    def rounds(self) -> list[list[Spoken]]:
        """Return the turns of each round."""
        return [[turn for turn in self.turns if turn.round == number] for number in range(len(self.walls_s))]


def gaps(turns: Sequence[Spoken]) -> list[float]:
    """Return the silences before these turns, except for turns that begin a round."""
    return [turn.gap_ms for turn in turns if turn.gap_ms is not None and not turn.begins]


def wraps(turns: Sequence[Spoken]) -> list[float]:
    """Return the silences between the last speaker of a round and the first of the next."""
    return [turn.gap_ms for turn in turns if turn.gap_ms is not None and turn.begins]


def share(turns: Sequence[Spoken]) -> float:
    """Return the reused share of all prompt tokens of these turns."""
    return sum(turn.reused_tokens for turn in turns) / (sum(turn.prompt_tokens for turn in turns) or 1)


def least_share(turns: Sequence[Spoken]) -> float:
    """Return the smallest reused share of a turn's prompt."""
    return min((share([turn]) for turn in turns), default=0.0)


COLUMNS = ("gap", "p90", "met", "wrap", "token", "prompt", "reused", "least", "computed", "prefilled", "wall")


def round_line(arm: str, turns: Sequence[Spoken], num_rounds: int, wall_s: float) -> str:
    """Summarise a round that has just ended."""
    found, wrapped = gaps(turns), wraps(turns)
    parts = [f"{arm}: round {turns[0].round + 1} of {num_rounds}"]
    if found:
        parts.append(f"gap {statistics.median(found):,.1f} ms")
    if wrapped:
        parts.append(f"from the round before {wrapped[0]:,.1f} ms")
    parts += [f"{share(turns):.1%} reused", f"{wall_s:.1f} s"]
    return ", ".join(parts)


def rounds_table(played: Played) -> Table:
    """Build a table with a row per round."""
    title = f"{played.arm}: a step alone {played.step_ms:.1f} ms, so a gap may take {played.bound_ms:.1f} ms"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("round", *COLUMNS):
        table.add_column(name, justify="right", no_wrap=True)
    for number, turns in enumerate(played.rounds()):
        table.add_row(str(number + 1), *_cells(turns, played.bound_ms), f"{played.walls_s[number]:.1f} s")
    return table


def totals_table(done: Sequence[Played]) -> Table:
    """Build a table with two rows per arm: its last round and all rounds."""
    table = Table(title="Last round and all rounds of each arm", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("arm", no_wrap=True)
    for name in ("rounds", *COLUMNS):
        table.add_column(name, justify="right", no_wrap=True)
    for played in done:
        last = len(played.walls_s)
        for label, turns, walls in (
            (f"{last}", played.rounds()[-1], played.walls_s[-1:]),
            (f"1-{last}", played.turns, played.walls_s),
        ):
            table.add_row(played.arm, label, *_cells(turns, played.bound_ms), f"{sum(walls):.1f} s")
    return table


def _cells(turns: Sequence[Spoken], bound_ms: float) -> list[str]:
    """Return cells in the order of `COLUMNS`, without the last."""
    found, wrapped = gaps(turns), wraps(turns)
    between = [turn.token_ms for turn in turns if turn.token_ms is not None]
    gap = statistics.median(found) if found else None
    return [
        "" if gap is None else f"{gap:,.1f} ms",
        "" if gap is None else f"{percentile(found, 0.9):,.1f} ms",
        "" if gap is None else ("yes" if gap <= bound_ms else "no"),
        f"{statistics.median(wrapped):,.1f} ms" if wrapped else "",
        f"{statistics.median(between):,.1f} ms" if between else "",
        f"{statistics.median(turn.prompt_tokens for turn in turns):,.0f}",
        f"{share(turns):.1%}",
        f"{least_share(turns):.1%}",
        f"{statistics.median(turn.computed_tokens for turn in turns):,.0f}",
        f"{statistics.median(turn.taken_in_tokens for turn in turns):,.0f}",
    ]


def percentile(values: Sequence[float], at: float) -> float:
    """Return the smallest value that a share `at` of all values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(at * len(ordered)))]


def measurements(played: Played) -> Iterator[Measurement]:
    """Yield an arm's measurements; the first one's detail holds its turns."""
    arm, turns = played.arm, played.turns
    held = {"bound_ms": round(played.bound_ms, 2), "met": played.is_met}
    if played.gaps_ms:
        detail = {**held, "turns": [asdict(turn) for turn in turns]}
        yield Measurement("gap between speakers", arm, "ms", tuple(played.gaps_ms), detail)
    if wrapped := wraps(turns):
        is_met = statistics.median(wrapped) <= played.bound_ms
        yield Measurement("gap between rounds", arm, "ms", tuple(wrapped), {**held, "met": is_met})
    yield Measurement("decode step alone", arm, "ms", played.steps_ms)
    between = tuple(turn.token_ms for turn in turns if turn.token_ms is not None)
    if between:
        yield Measurement("between two tokens in the session", arm, "ms", between)
    shares = tuple(share([turn]) for turn in turns)
    yield Measurement("reused share of a turn's prompt", arm, "share", shares, {"wanted": WANTED_SHARE})
    yield Measurement("computed at a turn", arm, "tokens", tuple(float(turn.computed_tokens) for turn in turns))
    yield Measurement("taken in before a turn", arm, "tokens", tuple(float(turn.taken_in_tokens) for turn in turns))
    yield Measurement("round", arm, "s", played.walls_s)


def plot_rounds(path: Path, done: Sequence[Played]) -> None:
    """Plot median silence and reused share by round, a line per arm, with the bound of the first arm."""
    plots = pyplot()
    figure, (above, below) = plots.subplots(2, 1, figsize=(9, 7), sharex=True, layout="constrained")
    for played in done:
        numbers = range(1, len(played.walls_s) + 1)
        medians = [statistics.median(found) if (found := gaps(turns)) else None for turns in played.rounds()]
        above.plot(numbers, medians, marker="o", label=played.arm)
        below.plot(numbers, [100 * share(turns) for turns in played.rounds()], marker="o", label=played.arm)
    if done:
        above.axhline(done[0].bound_ms, color="grey", linestyle=":", label="two steps + 10 ms")
        above.legend()
    below.axhline(100 * WANTED_SHARE, color="grey", linestyle=":")
    above.set_yscale("log")
    above.set_ylabel("silence between two speakers, ms")
    below.set_ylabel("reused of the prompts, %")
    below.set_xlabel("round")
    figure.savefig(path)
    plots.close(figure)
