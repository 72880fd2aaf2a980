"""Plot of an evaluation: the cost of each format, and recall over distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rekindle.harness.plot import pyplot
from rekindle_lab.bench.eval.kv import FormatScores
from rekindle_lab.bench.recall import RecallScore


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
