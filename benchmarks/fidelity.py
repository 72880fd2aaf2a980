"""`python -m benchmarks fidelity`: what formats of weights and of KV cost the two models of `tools.real_models`.

All are compared with the model in fp32, its weights as its file has them: formats of weights with native KV, formats of
KV with the weights that are served by default; `--arm candidates`: other ways to keep KV, with weights in fp32; `--arm
llama.cpp`: that on the same ids. The texts are this repository's documents and its code, which no model has learnt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.status import Status
from rich.table import Table

from benchmarks.candidates import candidates_of, measured_candidates, scored_candidates
from benchmarks.llama_logits import KV, LlamaModel
from rekindle.compute.load import load_model
from rekindle.config import ModelSettings, Settings
from rekindle.errors import ConfigError
from rekindle.model.loaded import LoadedModel
from rekindle.spec import KVLayout
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.bench.eval.bench import windows_of
from rekindle_lab.bench.eval.kv import Run, Score, layouts_of
from rekindle_lab.record import Measurement, Origin, deliver
from tools.real_models import REAL_MODELS

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", *(f"docs/{name}.md" for name in ("agents", "cache", "coordination", "design", "storage")))
TEXTS = {
    "prose": tuple(ROOT / name for name in DOCUMENTS),
    "code": tuple(sorted((ROOT / "src" / "rekindle" / "engine").glob("*.py"))),
}
WEIGHTS: Final = ("native", "int8", "int4")
ARMS: Final = ("formats", "candidates", "llama.cpp")
CHUNK_TOKENS = 128  # the logits of a step take 256,000 numbers a token where the vocabulary is Gemma's


@dataclass(frozen=True, slots=True)
class FidelityBench:
    """Names of models, of texts (none of either: all) and of arms, tokens of each text in all and in a window."""

    models: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    num_tokens: int = 2048
    context: int = 1024
    out: Path | None = None

    def __post_init__(self) -> None:
        for what, names, there in (
            ("model", self.models, REAL_MODELS),
            ("text", self.texts, TEXTS),
            ("arm", self.arms, ARMS),
        ):
            unknown = [name for name in names if name not in there]
            if unknown:
                raise ConfigError(f"no such {what}: {', '.join(unknown)}; there are {', '.join(there)}")


class Running(Protocol):
    """One window, computed chunk by chunk."""

    def logits(self, ids: np.ndarray, start: int, end: int) -> torch.Tensor:
        """Logits [end - start, vocab] of these positions, after all before them."""


class Arm(Protocol):
    """Something that computes windows."""

    def run(self, num_tokens: int) -> Running:
        """Begin one of so many tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A loaded model, and the layout of the KV that it is served with."""

    model: LoadedModel
    layout: KVLayout

    def run(self, num_tokens: int) -> Run:
        """Begin a window."""
        return Run(self.model, self.layout, num_tokens)


def run_fidelity(settings: Settings, options: FidelityBench, console: Console) -> int:
    """Measure each model, print the table and lines; return 0."""
    measured: list[Measurement] = []
    for name in options.models or REAL_MODELS:
        with console.status(f"{name} is compared with itself") as status:
            measured += _of_model(name, settings, options, status)
    console.print(_table(measured))
    described = {**asdict(options), "out": None, "threads": torch.get_num_threads()}
    deliver(measured, Origin.here("fidelity", described), options.out, console)
    return 0


def _of_model(name: str, settings: Settings, options: FidelityBench, status: Status) -> Iterator[Measurement]:
    plain = replace(settings.model, model=str(REAL_MODELS[name].path()))

    def loaded(own: ModelSettings) -> LoadedModel:
        return load_model(own, block_tokens=settings.cache.block_tokens, max_context=None, format_map_dir=None)

    exact = loaded(replace(plain, dtype="fp32", kv="fp32"))
    encoder = PromptEncoder.from_dir(exact.directory)
    windows = {
        kind: windows_of(encoder, TEXTS[kind], context=options.context, num_tokens=options.num_tokens, seed=0)
        for kind in options.texts or TEXTS
    }
    arms = options.arms or ARMS[:1]
    if "formats" in arms:
        for weights in WEIGHTS:
            yield from _of_weights(name, weights, loaded(replace(plain, weights=weights)), exact, windows)
    if "llama.cpp" in arms:
        yield from _of_llama_cpp(name, LlamaModel(REAL_MODELS[name].path(), torch.get_num_threads()), exact, windows)
    if "candidates" in arms:
        candidates = candidates_of(loaded(plain).spec.layout.layers)
        for kind, ids in windows.items():
            scores = scored_candidates(exact, candidates, ids, status.update)
            yield from measured_candidates(kind, candidates, scores, options.context)


def _of_weights(
    name: str, weights: str, model: LoadedModel, exact: LoadedModel, windows: Mapping[str, Sequence[np.ndarray]]
) -> Iterator[Measurement]:
    layouts = layouts_of(model)
    arms: dict[str, Served] = {weights: Served(model, layouts.pop("native"))}
    if weights == "native":
        arms |= {f"KV {kv}": Served(model, layout) for kv, layout in layouts.items()}
    for kind, ids in windows.items():
        yield from _measured(f"{name}, {kind}", scored(Served(exact, exact.spec.layout), arms, ids))
    if weights == "native":
        for arm, each in arms.items():
            num_bytes = sum(part.payload_bytes for part in each.layout.parts) / each.layout.block_tokens
            yield Measurement(f"{name}, KV of a token", arm, "bytes", (num_bytes,))


def _of_llama_cpp(
    name: str, model: LlamaModel, exact: LoadedModel, windows: Mapping[str, Sequence[np.ndarray]]
) -> Iterator[Measurement]:
    arms = {f"llama.cpp, KV {kv}": model.arm(kv) for kv in KV}
    for kind, ids in windows.items():
        yield from _measured(f"{name}, {kind}", scored(Served(exact, exact.spec.layout), arms, ids))
    for kv, arm in zip(KV, arms, strict=True):
        yield Measurement(
            f"{name}, KV of a token", arm, "bytes", (model.bytes_per_token(kv, exact.spec.layout.layers),)
        )


def scored(right: Arm, arms: Mapping[str, Arm], windows: Sequence[np.ndarray]) -> dict[str, Score]:
    """Score arms on windows of ids [tokens], uint32, by what the model of `right` says."""
    scores = {name: Score() for name in arms}
    for ids in windows:
        first, *others = (arm.run(len(ids)) for arm in (right, *arms.values()))
        following = torch.from_numpy(ids[1:].astype(np.int64))
        for start in range(0, len(following), CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, len(following))
            logits = first.logits(ids, start, end)
            for score, run in zip(scores.values(), others, strict=True):
                score.add(logits, run.logits(ids, start, end), following[start:end])
    return scores


def _measured(what: str, scores: Mapping[str, Score]) -> Iterator[Measurement]:
    for arm, score in scores.items():
        detail = {"positions": score.num_tokens}
        yield Measurement(f"{what}: KL", arm, "nats", (score.mean_kl,), detail)
        yield Measurement(f"{what}: the same first choice", arm, "share", (score.agreement,), detail)
        yield Measurement(f"{what}: perplexity", arm, "", (score.perplexity,), detail)


def _table(measured: Sequence[Measurement]) -> Table:
    arms = list(dict.fromkeys(each.arm for each in measured))
    table = Table("", *arms)
    found = {(each.measure, each.arm): each for each in measured}
    for measure in dict.fromkeys(each.measure for each in measured):
        values = [found.get((measure, arm)) for arm in arms]
        table.add_row(measure, *("" if each is None else f"{each.median:.4g}" for each in values))
    return table
