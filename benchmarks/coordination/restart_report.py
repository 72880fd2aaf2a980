"""Report of a session with killed servers: turns by phase and restarts, as tables and measurements. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich import box
from rich.table import Table

from benchmarks.coordination.messages import Comparison, numbered
from benchmarks.coordination.report import Spoken, gaps, least_share, share
from rekindle.demo.report import Check
from rekindle_lab.record import Measurement

BEFORE, FIRST, REST, AFTER = "before the kill", "first after the restart", "rest of that round", "rounds after"
PHASES = (BEFORE, FIRST, REST, AFTER)
COLUMNS = ("turns", "gap", "first token", "reused", "least", "computed", "from disk", "in memory", "load", "prefill")


@dataclass(frozen=True, slots=True)
class Restart:
    """One kill and its outcome. The client had received `num_pieces` chunks of text from `speaker`.

    Seconds, as seen by the client: `ready_s` from SIGKILL until the new server is ready; `first_token_s` from the
    request that resumes the round to its first token. `broken`: turns of the round received before the kill;
    `resumed`: those after it; `after`: turns of the rounds that followed.
    """

    speaker: str
    num_pieces: int
    ready_s: float
    first_token_s: float
    broken: tuple[Spoken, ...]
    resumed: tuple[Spoken, ...]
    after: tuple[Spoken, ...]
    compared: Comparison

    @property
    def alone_ms(self) -> float | None:
        """Milliseconds from the start of the first turn after the restart to its first token, by the server's clock."""
        return self.resumed[0].first_token_ms


@dataclass(frozen=True, slots=True)
class Endured:
    """One arm: turns before the first kill, the restarts, and the final comparison and misheard messages."""

    arm: str
    before: tuple[Spoken, ...]
    restarts: tuple[Restart, ...]
    compared: Comparison
    misheard: tuple[str, ...]

    def phases(self) -> dict[str, list[Spoken]]:
        """Return the turns of each phase, over all restarts."""
        return {
            BEFORE: [*self.before, *(turn for each in self.restarts for turn in each.broken)],
            FIRST: [each.resumed[0] for each in self.restarts],
            REST: [turn for each in self.restarts for turn in each.resumed[1:]],
            AFTER: [turn for each in self.restarts for turn in each.after],
        }

    def first_tokens_ms(self, phase: str) -> list[float]:
        """Return times to first tokens of a phase; for first speakers after a restart, as seen by the client."""
        if phase == FIRST:
            return [each.first_token_s * 1e3 for each in self.restarts]
        return [turn.first_token_ms for turn in self.phases()[phase] if turn.first_token_ms is not None]

    def checks(self) -> list[Check]:
        """Return what must hold, in text that names what does not."""
        found = []
        every = [(f"after restart {number}", each.compared) for number, each in enumerate(self.restarts, 1)]
        every.append(("at the end", self.compared))
        for what in ("lost", "changed", "doubled"):
            wrong = {when: numbers for when, compared in every if (numbers := getattr(compared, what))}
            places = ", ".join(f"{numbered(numbers)} {when}" for when, numbers in wrong.items())
            found.append(Check(f"{self.arm}: no message is {what}" + (f", but {places}" if wrong else ""), not wrong))
        heard = f"{self.arm}: every agent heard each message once, in order"
        return [*found, Check("; ".join([heard, *self.misheard]), not self.misheard)]


def turns_table(done: Endured) -> Table:
    """Build a table with a row per phase; medians, except for the shares: of all tokens and of the worst turn.

    The first speaker's first token after a restart is timed from the client's request, others' from their turn's start.
    """
    title = f"{done.arm}: turns before and after SIGKILL"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("phase", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for phase, turns in done.phases().items():
        if turns:
            table.add_row(phase, *_cells(turns, done.first_tokens_ms(phase)))
    return table


def _cells(turns: Sequence[Spoken], first_tokens_ms: Sequence[float]) -> list[str]:
    """Return cells in the order of `COLUMNS`."""
    return [
        f"{len(turns)}",
        _ms(gaps(turns)),
        _ms(first_tokens_ms),
        f"{share(turns):.1%}",
        f"{least_share(turns):.1%}",
        _count([turn.computed_tokens for turn in turns]),
        _count([turn.warm_tokens for turn in turns]),
        _count([turn.reused_tokens - turn.warm_tokens for turn in turns]),
        _ms([turn.timings["load_ms"] for turn in turns if "load_ms" in turn.timings]),
        _ms([turn.timings["prefill_ms"] for turn in turns if "prefill_ms" in turn.timings]),
    ]


def restarts_table(done: Endured) -> Table:
    """Build a table with a row per restart, and one with medians and the final comparison."""
    title = f"{done.arm}: restarts; seconds from SIGKILL on, milliseconds from the request and from the first turn on"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("restart", "killed while"):
        table.add_column(name, no_wrap=True)
    for name in (
        "ready",
        "first token",
        "from request",
        "turn alone",
        "received",
        "found",
        "lost",
        "changed",
        "doubled",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for number, each in enumerate(done.restarts, 1):
        table.add_row(f"{number}", f"{each.speaker} spoke", *_waits([each]), *_counts(each.compared))
    table.add_row("median", "at the end", *_waits(done.restarts), *_counts(done.compared))
    return table


def _waits(restarts: Sequence[Restart]) -> list[str]:
    """Return medians: from SIGKILL to ready and to the first token; to that from the request and the turn's start."""
    ready_s = statistics.median(each.ready_s for each in restarts)
    first_s = statistics.median(each.ready_s + each.first_token_s for each in restarts)
    alone = [each.alone_ms for each in restarts if each.alone_ms is not None]
    from_request = [each.first_token_s * 1e3 for each in restarts]
    return [f"{ready_s:.2f} s", f"{first_s:.2f} s", _ms(from_request), _ms(alone)]


def _counts(compared: Comparison) -> list[str]:
    return [
        f"{compared.received}",
        f"{compared.found}",
        *(f"{len(numbers)}" for numbers in (compared.lost, compared.changed, compared.doubled)),
    ]


def measurements(done: Endured) -> Iterator[Measurement]:
    """Yield an arm's measurements; the detail of a phase's computed tokens holds its turns."""
    arm, restarts = done.arm, done.restarts
    for phase, turns in done.phases().items():
        if not turns:
            continue
        if found := gaps(turns):
            yield Measurement(f"gap between speakers, {phase}", arm, "ms", tuple(found))
        if waited := done.first_tokens_ms(phase):
            yield Measurement(f"first token, {phase}", arm, "ms", tuple(waited))
        shares = tuple(share([turn]) for turn in turns)
        yield Measurement(f"reused share of a turn's prompt, {phase}", arm, "share", shares)
        computed = tuple(float(turn.computed_tokens) for turn in turns)
        detail = {"turns": [asdict(turn) for turn in turns]}
        yield Measurement(f"computed at a turn, {phase}", arm, "tokens", computed, detail)
        warm = tuple(float(turn.warm_tokens) for turn in turns)
        yield Measurement(f"from disk at a turn, {phase}", arm, "tokens", warm)
    killed = {"killed": [{"speaker": each.speaker, "pieces": each.num_pieces} for each in restarts]}
    yield Measurement("SIGKILL to ready", arm, "s", tuple(each.ready_s for each in restarts), killed)
    firsts = tuple(each.ready_s + each.first_token_s for each in restarts)
    yield Measurement("SIGKILL to first token", arm, "s", firsts)
    if alone := tuple(each.alone_ms for each in restarts if each.alone_ms is not None):
        yield Measurement(f"first token of the turn alone, {FIRST}", arm, "ms", alone)
    compared = [*(each.compared for each in restarts), done.compared]
    yield Measurement("messages received", arm, "messages", tuple(float(each.received) for each in compared))
    yield Measurement("messages found", arm, "messages", tuple(float(each.found) for each in compared))
    for what in ("lost", "changed", "doubled"):
        numbers = [list(getattr(each, what)) for each in compared]
        counts = tuple(float(len(each)) for each in numbers)
        yield Measurement(f"messages {what}", arm, "messages", counts, {"numbers": numbers})
    yield Measurement("agents that heard wrongly", arm, "agents", (float(len(done.misheard)),))


def _ms(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.1f} ms" if values else ""


def _count(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f}"
