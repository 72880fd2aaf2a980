"""An analysis as tables, JSON and a plot. Owns the wording; counts nothing itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rekindle.config import PromptSettings
from rekindle_lab.analyze.analysis import Analysis, Arm, RecomputedLine, Sums
from rekindle_lab.analyze.logfile import Log
from rekindle_lab.analyze.recomputed import LINES, first_line
from rekindle_lab.plot import pyplot

CAUSES: Mapping[str, str] = {
    "attribution_header": "attribution line",
    "date_line": "date or time",
    "tool_order": "order of tools",
    "template_rewrote_history": "rewritten by template or client",
    "text_differs": "edited or compacted",
}
FIXES: Mapping[str, str] = {
    "attribution_header": "--normalise attribution (the default)",
    "date_line": "--normalise dates, or put it at the end of the prompt",
    "tool_order": "--normalise tools, or sort them",
    "template_rewrote_history": "--anticipate on (the default)",
    "text_differs": "append instead of editing",
}
COLOURS = dict(zip(CAUSES, ("#d62828", "#f77f00", "#fcbf49", "#9d4edd", "#7f4f24"), strict=True))
QUOTE_CHARS = 100
DEFAULT = (PromptSettings().normalise, PromptSettings().anticipate)


def print_report(console: Console, analysis: Analysis, log: Log, *, model: str, rows: int) -> None:
    """Print the totals, then the tables, the long ones cut to `rows`."""
    _print_counts(console, analysis, log, model)
    if not analysis.total.prompt_tokens:
        return
    console.print(_shares(analysis.total))
    if analysis.lines:
        _print_lines(console, analysis, rows)
    console.print(_arms(analysis.arms))
    console.print(_conversations(analysis.conversations, rows))


def as_json(analysis: Analysis, log: Log, *, path: Path, model: str) -> dict[str, Any]:
    """Return the whole analysis as JSON, with every conversation and line."""
    return {
        "log": str(path),
        "model": model,
        "num_entries": log.num_entries,
        "skipped": {reason: asdict(example) for reason, example in log.skipped.items()},
        "refused": {reason: asdict(example) for reason, example in analysis.refused.items()},
        "num_forgotten": analysis.num_forgotten,
        "template": analysis.growth.summary() if analysis.growth is not None else None,
        "total": _sums(analysis.total),
        "arms": [{**asdict(arm), "computed_tokens": arm.computed_tokens} for arm in analysis.arms],
        "lines": [_line(line) for line in analysis.worst_lines()],
        "conversations": {name: _sums(sums) for name, sums in analysis.conversations.items()},
    }


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write one JSON document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def plot_analysis(path: Path, analysis: Analysis) -> None:
    """Write a PNG: where the prompt tokens went, request by request, and what each handling leaves to compute."""
    plots = pyplot()
    figure, (curve, bars) = plots.subplots(1, 2, figsize=(12, 5), width_ratios=(3, 2), layout="constrained")
    points = analysis.curve
    causes = [cause for cause in CAUSES if analysis.total.recomputed[cause]]
    recomputed = [
        (f"recomputed: {CAUSES[cause]}", [point.recomputed.get(cause, 0) for point in points]) for cause in causes
    ]
    layers = [
        ("reused, own", [point.own_tokens for point in points]),
        ("reused, others'", [point.other_tokens for point in points]),
        ("new", [point.new_tokens for point in points]),
        *recomputed,
    ]
    curve.stackplot(
        [point.num_requests for point in points],
        *(values for _, values in layers),
        labels=[label for label, _ in layers],
        colors=["#2a7f62", "#8cc7a1", "#9aa5b1", *(COLOURS[cause] for cause in causes)],
    )
    curve.set_xlabel("requests")
    curve.set_ylabel("prompt tokens so far")
    curve.legend(loc="upper left")
    arms = list(_distinct_arms(analysis.arms))
    labels = [f"normalise {arm.normalise}\nanticipate {arm.anticipate}" for arm in arms]
    bars.barh(labels, [100 * arm.computed_tokens / max(arm.prompt_tokens, 1) for arm in arms], color="#9aa5b1")
    bars.invert_yaxis()
    bars.set_xlabel("left to compute, % of prompt tokens")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plots.close(figure)


def _print_counts(console: Console, analysis: Analysis, log: Log, model: str) -> None:
    total = analysis.total
    counts = f"{total.num_requests:,} requests in {len(analysis.conversations):,} conversations, "
    console.print(f"{counts}{total.prompt_tokens:,} prompt tokens as {model} counts them", highlight=False)
    for reason, example in log.skipped.items():
        console.print(f"{example.count:,} entries passed over: {reason} (first: {example.place})", highlight=False)
    for reason, example in sorted(analysis.refused.items(), key=lambda item: -item[1].count)[:5]:
        text = f"{example.count:,} requests not counted: {reason} (first: {example.place})"
        console.print(Text(text), highlight=False)
    if len(analysis.refused) > 5:
        console.print(f"and requests that were not counted for {len(analysis.refused) - 5} other reasons")
    if analysis.num_forgotten:
        text = f"{analysis.num_forgotten:,} sequences were dropped to bound memory: reuse may be higher"
        console.print(text, highlight=False)
    if total.reported_prompt_tokens:
        share = _percent(total.reported_cached_tokens, total.reported_prompt_tokens)
        text = f"the answers in the log say that {share} of {total.reported_prompt_tokens:,} prompt tokens were cached"
        console.print(text, highlight=False)


def _shares(total: Sums) -> Table:
    shown = _table("Where the prompts' tokens went", "", "tokens", "share", "fix")
    rows = [("reused, the conversation's own", total.own_tokens, ""), ("reused, of others", total.other_tokens, "")]
    ordered = sorted(total.recomputed.items(), key=lambda item: -item[1])
    rows += [(f"recomputed: {CAUSES.get(cause, cause)}", tokens, FIXES.get(cause, "")) for cause, tokens in ordered]
    rows.append(("new", total.new_tokens, ""))
    for name, tokens, fix in rows:
        shown.add_row(name, f"{tokens:,}", _percent(tokens, total.prompt_tokens), fix)
    return shown


def _print_lines(console: Console, analysis: Analysis, rows: int) -> None:
    lines = analysis.worst_lines()
    console.print(f"\nWhat costs most{_rest(len(lines), rows)}:", highlight=False)
    for line in lines[:rows]:
        role = f" in {line.role}" if line.role else ""
        cause = CAUSES.get(line.cause, line.cause)
        head = f"{line.num_tokens:>12,} tokens in {line.num_requests:,} requests: {cause}{role}, worst at {line.place}"
        console.print(Text(head), soft_wrap=True)
        for label, quote in (("was", line.explanation.stored), ("is", line.explanation.sent)):
            shown = first_line(quote) if line.cause in LINES else quote or ""
            console.print(Text(f"{label:>16}  {_short(shown)}", style="dim"), soft_wrap=True)


def _arms(arms: list[Arm]) -> Table:
    shown = _table(
        "What this server would make of it", "--normalise", "--anticipate", "reused", "computed", "given back"
    )
    base = arms[0]
    for arm in _distinct_arms(arms):
        name = f"{arm.normalise} (default)" if (arm.normalise, arm.anticipate) == DEFAULT else arm.normalise
        share = _percent(arm.reused_tokens, arm.prompt_tokens)
        back = "" if arm == base else f"{base.computed_tokens - arm.computed_tokens:,}"
        shown.add_row(name, arm.anticipate, share, f"{arm.computed_tokens:,}", back)
    return shown


def _distinct_arms(arms: Sequence[Arm]) -> Iterator[Arm]:
    """Yield the default arm and those that make a difference in this log."""
    shown: list[int] = []
    for arm in arms:
        is_close = any(abs(arm.computed_tokens - other) <= arm.prompt_tokens / 2000 for other in shown)
        if not is_close or (arm.normalise, arm.anticipate) == DEFAULT:
            shown.append(arm.computed_tokens)
            yield arm


def _conversations(conversations: Mapping[str, Sums], rows: int) -> Table:
    title = f"Conversations{_rest(len(conversations), rows)}"
    shown = _table(title, "", "requests", "prompt", "own", "others'", "recomputed", "new", "mostly recomputed by")
    costly = sorted(conversations.items(), key=lambda item: (-item[1].recomputed_tokens, -item[1].prompt_tokens))
    for name, sums in costly[:rows]:
        cause = max(sums.recomputed, key=lambda each: sums.recomputed[each], default="")
        parts = (sums.own_tokens, sums.other_tokens, sums.recomputed_tokens, sums.new_tokens)
        shares = (_percent(part, sums.prompt_tokens) for part in parts)
        cells = (f"{sums.num_requests:,}", f"{sums.prompt_tokens:,}", *shares, CAUSES.get(cause, cause))
        shown.add_row(Text(name), *cells)
    return shown


def _table(title: str, *columns: str) -> Table:
    shown = Table(title=title, title_justify="left")
    for name in columns:
        is_text = name in ("", "fix", "--normalise", "--anticipate", "mostly recomputed by")
        shown.add_column(name, justify="left" if is_text else "right", overflow="ellipsis", no_wrap=is_text)
    return shown


def _rest(count: int, rows: int) -> str:
    return f" (the first {rows} of {count:,})" if count > rows else ""


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _short(quote: str) -> str:
    """A quote on one line."""
    text = quote.replace("\n", "⏎")
    return text if len(text) <= QUOTE_CHARS else text[:QUOTE_CHARS] + "…"


def _sums(sums: Sums) -> dict[str, Any]:
    return {
        "requests": sums.num_requests,
        "prompt_tokens": sums.prompt_tokens,
        "reused_own_tokens": sums.own_tokens,
        "reused_others_tokens": sums.other_tokens,
        "recomputed_tokens": dict(sums.recomputed),
        "new_tokens": sums.new_tokens,
        "log_prompt_tokens": sums.reported_prompt_tokens,
        "log_cached_tokens": sums.reported_cached_tokens,
    }


def _line(line: RecomputedLine) -> dict[str, Any]:
    return {
        "cause": line.cause,
        "role": line.role,
        "recomputed_tokens": line.num_tokens,
        "requests": line.num_requests,
        "place": line.place,
        **{
            f"worst_{name}": value for name, value in asdict(line.explanation).items() if name not in ("cause", "offer")
        },
    }
