"""Reports of what a batch of prompts shares: a table, JSON and a plot. Counts nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import category

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from rekindle.cache.library.batch import BatchAnalysis, SharedPrefix, analyze_batch
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.analyze.promptfile import Prompt
from rekindle_lab.plot import pyplot

QUOTE_TOKENS, QUOTE_CHARS = 32, 60


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts, their ids as one model encodes them, and what they share."""

    prompts: Sequence[Prompt]
    ids: Sequence[np.ndarray]
    analysis: BatchAnalysis
    encoder: PromptEncoder

    @classmethod
    def encode(cls, prompts: Sequence[Prompt], directory: Path, *, min_length: int, console: Console) -> Batch:
        """Encode the prompts as for completions, with the tokenizer in `directory`, and analyse them."""
        encoder = PromptEncoder.from_dir(directory)
        with Progress(console=console, transient=True) as bar:
            tracked = bar.track(prompts, description=f"{len(prompts):,} prompts")
            ids = [encoder.encode(encoder.render_text(prompt.text)) for prompt in tracked]
        return cls(prompts, ids, analyze_batch(ids, min_length=min_length), encoder)

    def end_of(self, shared: SharedPrefix) -> str:
        """Return the last words of a shared prefix on one line, with unprintable characters escaped."""
        ids = self.ids[shared.first_prompt][: shared.length]
        text = self.encoder.readable(self.encoder.key_of(ids[-QUOTE_TOKENS:])).replace("\n", "⏎").replace("\t", " ")
        is_whole = len(ids) <= QUOTE_TOKENS and len(text) <= QUOTE_CHARS
        return _printable(text if is_whole else "…" + text[-QUOTE_CHARS:])


def print_batch(console: Console, batch: Batch, *, model: str, rows: int) -> None:
    """Print the totals, then the `rows` shared prefixes that save most, with the tokens each adds to its parent."""
    found = batch.analysis
    console.print(
        f"{found.num_prompts:,} prompts, {found.total_tokens:,} tokens as {model} counts them. With what they share "
        f"computed once, {found.distinct_tokens:,} are left: {_percent(found.saved_tokens, found.total_tokens)} less",
        highlight=False,
    )
    if found.identical:
        num_again = sum(len(same) - 1 for same in found.identical)
        most = max(found.identical, key=len)
        text = f"{num_again:,} of them repeat an earlier one; {batch.prompts[most[0]].place} comes most often"
        console.print(f"{text}, {len(most):,} times", highlight=False)
    if found.shared:
        console.print(_table(batch, rows))


def batch_json(batch: Batch, *, path: Path, model: str) -> dict[str, Any]:
    """Return the whole report as JSON, with every shared prefix and repetition."""
    found = batch.analysis
    return {
        "prompts": str(path),
        "model": model,
        "num_prompts": found.num_prompts,
        "total_tokens": found.total_tokens,
        "distinct_tokens": found.distinct_tokens,
        "saved_tokens": found.saved_tokens,
        "deduplication": found.deduplication,
        "shared": [
            {
                "tokens": each.length,
                "prompts": each.num_prompts,
                "stretch_tokens": each.stretch,
                "saved_tokens": each.saved_tokens,
                "first": batch.prompts[each.first_prompt].place,
                "ends_with": batch.end_of(each),
            }
            for each in found.shared
        ],
        "identical": [[batch.prompts[index].place for index in same] for same in found.identical],
    }


def plot_batch(path: Path, batch: Batch, *, rows: int) -> None:
    """Write a PNG of where the batch's tokens go, with a bar for each of the prefixes that save most."""
    plots = pyplot()
    found = batch.analysis
    top = found.shared[:rows]
    others = found.saved_tokens - sum(each.saved_tokens for each in top)
    bars = [("left to compute", found.distinct_tokens, "#9aa5b1")]
    bars += [(f"{each.num_prompts:,} x {_short(batch.end_of(each))}", each.saved_tokens, "#2a7f62") for each in top]
    if others:
        bars.append((f"{len(found.shared) - len(top):,} other shared prefixes", others, "#8cc7a1"))
    figure, axes = plots.subplots(figsize=(10, 1.5 + 0.4 * len(bars)), layout="constrained")
    places = range(len(bars))
    axes.barh(places, [tokens for _, tokens, _ in bars], color=[colour for _, _, colour in bars])
    axes.set_yticks(places, [label.replace("$", r"\$") for label, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel(
        f"of {found.total_tokens:,} tokens in {found.num_prompts:,} prompts: left, and saved by each prefix"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plots.close(figure)


def _table(batch: Batch, rows: int) -> Table:
    found = batch.analysis
    rest = f" (the first {rows} of {len(found.shared):,})" if len(found.shared) > rows else ""
    shown = Table(title=f"What the prompts share{rest}", title_justify="left")
    for name in ("tokens", "adds", "prompts", "saved", "share"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("first", no_wrap=True)
    shown.add_column("ends with", overflow="fold")
    for each in found.shared[:rows]:
        counts = (f"{each.length:,}", f"{each.stretch:,}", f"{each.num_prompts:,}", f"{each.saved_tokens:,}")
        share = _percent(each.saved_tokens, found.total_tokens)
        shown.add_row(*counts, share, batch.prompts[each.first_prompt].place, Text(batch.end_of(each)))
    return shown


def _printable(text: str) -> str:
    """Escape what a terminal would act on: control characters, direction marks, lone surrogates."""
    return "".join(
        each if each.isprintable() or category(each) == "Zs" else each.encode("unicode_escape").decode()
        for each in text
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _short(text: str) -> str:
    return text if len(text) <= QUOTE_CHARS // 2 else "…" + text[-QUOTE_CHARS // 2 :]
