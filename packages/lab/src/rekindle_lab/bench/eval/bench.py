"""`rekindle eval MODEL --text FILE`: what KV formats cost a model in quality, on a user's text.

Perplexity, mean KL and agreement of the likeliest token against native KV, for each format, hot and with the first half
of every window restored from disk; then recall of stated facts by distance, hot and after a restart. `kv` and
`recall` measure; this module owns the report.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rekindle.compute.load import load_model
from rekindle.config import Settings
from rekindle.errors import BadRequest, ConfigError
from rekindle.model.formats import native_format, summary
from rekindle.model.loaded import LoadedModel
from rekindle.text.messages import normalise_messages
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.bench.eval.kv import FormatScores, Score, layouts_of, score_formats
from rekindle_lab.bench.recall import KV, RecallArm, RecallBench, RecallScore, ask_arm, questions_of
from rekindle_lab.plot import check_plot, pyplot
from rekindle_lab.record import Measurement, Origin, deliver
from rekindle_pocket.conversations import conversation

MIN_BLOCKS = 4  # of a window: two restored, two computed on top
CONVERSATION_WORDS = 600


def windows_of(
    encoder: PromptEncoder, paths: Sequence[Path], *, context: int, num_tokens: int, seed: int
) -> list[np.ndarray]:
    """Return up to `num_tokens` ids in windows of `context`, each after the tokens that begin a text for this model.

    Without paths the bundled generator supplies conversations, in the model's chat format if it has one. ConfigError if
    a file cannot be read or the text is shorter than one window.
    """
    leading = encoder.encode(encoder.render_text(""))
    room = context - len(leading)
    rest = _of_files(encoder, paths, len(leading)) if paths else _generated(encoder, num_tokens, seed, len(leading))
    count = min(num_tokens // context, len(rest) // room)
    if count < 1:
        raise ConfigError(f"the text has {len(rest)} tokens, less than one window of {context}: give more text")
    return [np.concatenate([leading, rest[at * room : (at + 1) * room]]) for at in range(count)]


def _of_files(encoder: PromptEncoder, paths: Sequence[Path], num_leading: int) -> np.ndarray:
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {path}: {error}") from error
    try:
        return encoder.encode(encoder.render_text("\n\n".join(texts)))[num_leading:]
    except BadRequest as error:
        raise ConfigError(f"--text: {error}") from error


def _generated(encoder: PromptEncoder, num_tokens: int, seed: int, num_leading: int) -> np.ndarray:
    chooser = random.Random(seed)
    pieces: list[np.ndarray] = []
    while sum(map(len, pieces)) < num_tokens:
        chat = conversation(chooser, CONVERSATION_WORDS)
        try:
            prompt = encoder.render_chat(normalise_messages(chat["messages"]), add_generation_prompt=False)
            pieces.append(encoder.encode(prompt))
        except BadRequest:  # no template, or one that wants other turns
            text = "\n".join(message["content"] for message in chat["messages"])
            pieces.append(encoder.encode(encoder.render_text(text))[num_leading:])
    return np.concatenate(pieces)


def plot_eval(path: Path, scores: Sequence[FormatScores], recall: Mapping[str, Mapping[int, RecallScore]]) -> None:
    """Write a PNG: perplexity change and mean KL by format (native is zero), and recall by words in between."""
    plots = pyplot()
    figure, axes = plots.subplots(1, 3 if recall else 2, figsize=(12 if recall else 8, 4), layout="constrained")
    native, others = scores[0], scores[1:]
    names = [score.name for score in others]
    hot = [(score.second.perplexity / native.second.perplexity - 1) * 100 for score in others]
    back = [(score.restored.perplexity / native.second.perplexity - 1) * 100 for score in others]
    places = range(len(others))
    axes[0].bar([place - 0.2 for place in places], hot, width=0.4, label="hot")
    axes[0].bar([place + 0.2 for place in places], back, width=0.4, label="restored")
    axes[0].set_xticks(list(places), names)
    axes[0].set_ylabel("perplexity against native, %")
    axes[0].legend()
    axes[1].bar(names, [score.whole.mean_kl for score in others])
    axes[1].set_yscale("log")
    axes[1].set_ylabel("mean KL to native, nats a token")
    for arm, by_distance in recall.items():
        asked = [(distance, score.recalled / score.asked) for distance, score in by_distance.items() if score.asked]
        style = "--" if arm.endswith("restarted") else "-"
        axes[2].plot([distance for distance, _ in asked], [share for _, share in asked], style, marker="o", label=arm)
    if recall:
        axes[2].set_xlabel("words between fact and question")
        axes[2].set_ylabel("answers that contain the fact")
        axes[2].set_ylim(0, 1.05)
        axes[2].legend()
    figure.savefig(path)
    plots.close(figure)


@dataclass(frozen=True, slots=True)
class EvalBench:
    """Files to read (none: generated text), tokens in total and per window, questions per distance, outputs."""

    texts: tuple[Path, ...] = ()
    num_tokens: int = 8192
    context: int = 1024
    cases: int = 10
    seed: int = 0
    out: Path | None = None
    plot: Path | None = None


def run_eval(settings: Settings, bench: EvalBench, console: Console) -> int:
    """Measure, print both tables, write lines and plot; return 0."""
    check_plot(bench.plot)
    size = settings.cache.block_tokens
    if bench.context < MIN_BLOCKS * size:
        raise ConfigError(f"--context must be at least {MIN_BLOCKS * size} tokens ({MIN_BLOCKS} blocks)")
    loaded = load_model(settings.model, block_tokens=size, max_context=settings.engine.max_context, format_map_dir=None)
    if bench.context > loaded.spec.max_context:
        raise ConfigError(f"--context is {bench.context}, the model holds {loaded.spec.max_context} tokens")
    encoder = PromptEncoder.from_dir(loaded.directory)
    console.print(f"{loaded.spec.name}: --kv auto gives {summary(loaded.formats)}", soft_wrap=True)
    scores = _scores(loaded, encoder, bench, console)
    console.print(_quality_table(scores))
    recall = _recall(settings, native_format(loaded.dtype), encoder, bench, console)
    if recall:
        console.print(_recall_table(recall, bench))
    measured = [*_measured(scores), *_measured_recall(recall)]
    if bench.plot is not None:
        plot_eval(bench.plot, scores, recall)
        console.print(f"plot: {bench.plot}", soft_wrap=True)
    deliver(measured, Origin.here("eval", _described(settings, bench)), bench.out, console)
    return 0


def _described(settings: Settings, bench: EvalBench) -> dict[str, object]:
    return {
        "model": settings.model.model,
        "texts": [path.name for path in bench.texts],
        "num_tokens": bench.num_tokens,
        "context": bench.context,
        "cases": bench.cases,
        "seed": bench.seed,
    }


def _scores(loaded: LoadedModel, encoder: PromptEncoder, bench: EvalBench, console: Console) -> list[FormatScores]:
    windows = windows_of(encoder, bench.texts, context=bench.context, num_tokens=bench.num_tokens, seed=bench.seed)
    with Progress(console=console, transient=True) as tick:
        task = tick.add_task("perplexity", total=len(windows))
        return score_formats(loaded, layouts_of(loaded), windows, advance=lambda: tick.advance(task))


def _change(score: Score, native: Score) -> str:
    return f"{(score.perplexity / native.perplexity - 1):+.2%}"


def _quality_table(scores: Sequence[FormatScores]) -> Table:
    native = scores[0]
    whole = native.whole
    title = f"{whole.num_tokens:,} positions, native perplexity {whole.perplexity:.3f}; in brackets: second halves only"
    table = Table(title=title)
    for column in ("KV", "bytes/token", "perplexity", "mean KL", "top-1", "(hot)", "(restored)", "(same bits)"):
        table.add_column(column, justify="left" if column == "KV" else "right", no_wrap=True)
    for score in scores:
        table.add_row(
            score.name,
            f"{score.bytes_per_token:,.0f}",
            _change(score.whole, whole),
            f"{score.whole.mean_kl:.1e}",
            f"{score.whole.agreement:.1%}",
            _change(score.second, native.second),
            _change(score.restored, native.second),
            f"{score.restored.num_equal / score.restored.num_tokens:.1%}",
        )
    return table


def _recall(
    settings: Settings, native: str, encoder: PromptEncoder, bench: EvalBench, console: Console
) -> dict[str, dict[int, RecallScore]]:
    """Return scores by arm and distance; empty without a chat template or without cases."""
    if not bench.cases:
        return {}
    if not encoder.template.sources:
        console.print("recall: the model has no chat template to ask by")
        return {}
    kv: KV = "bf16" if native == "bf16" else "fp32"
    arms = (
        RecallArm("native, hot", kv),
        RecallArm("native, restarted", kv, restarted=True),
        RecallArm("auto, hot", "auto"),
        RecallArm("auto, restarted", "auto", restarted=True),
    )
    questions = questions_of(RecallBench(cases=bench.cases, seed=10_000 + bench.seed))
    with Progress(console=console, transient=True) as tick:
        return {arm.name: ask_arm(settings, arm, questions, tick) for arm in arms}


def _recall_table(recall: dict[str, dict[int, RecallScore]], bench: EvalBench) -> Table:
    table = Table("words between", *recall, title=f"recall, {bench.cases} questions a row")
    for distance in next(iter(recall.values())):
        found = [scores[distance] for scores in recall.values()]
        table.add_row(f"{distance:,}", *(f"{s.recalled}/{s.asked}" if s.asked else "too long" for s in found))
    return table


def _measured(scores: Sequence[FormatScores]) -> list[Measurement]:
    found = []
    for each in scores:
        for part, score in (("", each.whole), (", second half", each.second), (", restored", each.restored)):
            arm, detail = each.name + part, {"positions": score.num_tokens}
            found += [
                Measurement("perplexity", arm, "", (score.perplexity,), detail),
                Measurement("mean KL to native", arm, "nats", (score.mean_kl,), detail),
                Measurement("top-1 agreement with native", arm, "share", (score.agreement,), detail),
            ]
        found.append(Measurement("KV bytes per token", each.name, "bytes", (each.bytes_per_token,)))
    return found


def _measured_recall(recall: dict[str, dict[int, RecallScore]]) -> list[Measurement]:
    return [
        Measurement(f"recall at {distance} words", arm, "share", (each.recalled / each.asked,), {"asked": each.asked})
        for arm, scores in recall.items()
        for distance, each in scores.items()
        if each.asked
    ]
