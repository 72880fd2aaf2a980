"""Quality cost of KV formats: the same text under several formats at once, compared with native at each position.

Owns the arms (an arena and a runner each, over one loaded model) and their scores. All arms compute the same chunk
before any computes the next, so only one chunk of logits per arm is in memory. In the middle of each window every
arm's blocks go through a real store, closed and reopened, into a second run that computes the second half from them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np
import torch

from rekindle.cache.blocks.hashing import BlockIdentity, chain_hashes, root_hash
from rekindle.config import StoreSettings
from rekindle.errors import StoreError
from rekindle.kv.arena import KVArena
from rekindle.kv.copies import BlockPart
from rekindle.model.batch import SequenceStep
from rekindle.model.formats import in_4_bits, native_format
from rekindle.model.loaded import LoadedModel
from rekindle.spec import Format, KVLayout
from rekindle.store.values import Bytes
from rekindle.store.warm import BlockBytes, WarmStore

CHUNK_TOKENS = 256
CACHED_ROWS = 8  # whose logits, in fp64, stay in the processor's cache
LOAD_S = 60.0


@dataclass(slots=True)
class Score:
    """Sums over scored positions: negative log-likelihood and KL in nats, and how often the likeliest token agrees."""

    num_tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    agreed: int = 0
    num_equal: int = 0  # positions with logits bitwise equal to those of the run that was not restored

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.nll / self.num_tokens)

    @property
    def mean_kl(self) -> float:
        """KL(native ‖ this), nats per token."""
        return self.kl / self.num_tokens

    @property
    def agreement(self) -> float:
        """Share of positions at which the likeliest token is that of native KV."""
        return self.agreed / self.num_tokens

    def add(self, native: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Add rows of logits [tokens, vocab] for these next tokens [tokens], a few at a time: three times as fast."""
        self.num_tokens += len(targets)
        self.agreed += int((native.argmax(-1) == logits.argmax(-1)).sum())
        for at in range(0, len(targets), CACHED_ROWS):
            rows = slice(at, at + CACHED_ROWS)
            reference, ours = native[rows].double().log_softmax(-1), logits[rows].double().log_softmax(-1)
            self.nll -= float(ours.gather(-1, targets[rows, None]).sum())
            self.kl += float((reference.exp() * (reference - ours)).sum().clamp_min(0))

    def with_all_of(self, other: Score) -> Score:
        """The sums of both."""
        return Score(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True, slots=True)
class FormatScores:
    """Scores of one format: all positions, the second halves, and these with the first half restored."""

    name: str
    bytes_per_token: float
    whole: Score = field(default_factory=Score)
    second: Score = field(default_factory=Score)
    restored: Score = field(default_factory=Score)


def layouts_of(loaded: LoadedModel) -> dict[str, KVLayout]:
    """Return the formats to compare by name: native first, then the choice of `auto`, then wherever they fit 4 bits, 8
    for K alone, and 8."""
    native, auto = native_format(loaded.dtype), loaded.spec.layout

    def everywhere(k: Format, v: Format) -> KVLayout:
        return KVLayout(auto.block_tokens, tuple(replace(layer, k_format=k, v_format=v) for layer in auto.layers))

    def coded(k: Format, v: Format) -> KVLayout:
        fit = [(layer, *in_4_bits(layer, native)) for layer in auto.layers]
        layers = (
            replace(layer, k_format=k if of_k == "q4h" else native, v_format=v if of_v == "q4h" else native)
            for layer, of_k, of_v in fit
        )
        return KVLayout(auto.block_tokens, tuple(layers))

    found = {"native": everywhere(native, native), "auto": auto}
    if native == "fp32":
        found["bf16"] = everywhere("bf16", "bf16")
    return found | {"q4h": coded("q4h", "q4h"), "q8h/q4h": coded("q8h", "q4h"), "q8h": coded("q8h", "q8h")}


class Run:
    """One window under one layout, in an arena just large enough for it."""

    def __init__(self, loaded: LoadedModel, layout: KVLayout, num_tokens: int) -> None:
        num_blocks, compute = -(-num_tokens // layout.block_tokens), loaded.compute
        self.arena = compute.arena(layout, num_blocks, loaded.device)
        self._runner = compute.runner(replace(loaded, spec=replace(loaded.spec, layout=layout)), self.arena)
        self._blocks = list(range(self.arena.num_blocks))

    def logits(self, ids: np.ndarray, start: int, end: int) -> torch.Tensor:
        """Return logits [end - start, vocab] of these positions; everything before them must be in the arena."""
        step = SequenceStep(ids[start:end], start, self._blocks, start, "all")
        launched = self._runner.launch([step])
        assert not launched.wait(), "KV or logits that are not finite"
        return launched.logits


def score_formats(
    loaded: LoadedModel, layouts: Mapping[str, KVLayout], windows: Sequence[np.ndarray], *, advance: Callable[[], None]
) -> list[FormatScores]:
    """Score windows of token ids [tokens], uint32, cut in two at a block's end; the first layout is the reference.

    `advance` is called after each window. Raises StoreError if the temporary store fails.
    """
    scores = [
        FormatScores(name, sum(part.payload_bytes for part in layout.parts) / layout.block_tokens)
        for name, layout in layouts.items()
    ]
    for ids in windows:
        _score_window(loaded, list(layouts.values()), ids, scores)
        advance()
    return scores


def _score_window(
    loaded: LoadedModel, layouts: Sequence[KVLayout], ids: np.ndarray, scores: Sequence[FormatScores]
) -> None:
    size = layouts[0].block_tokens
    half = len(ids) // 2 // size * size
    targets = torch.from_numpy(ids.astype(np.int64))
    runs = [Run(loaded, layout, len(ids)) for layout in layouts]
    restored: list[Run] = []
    for start, end in _chunks(len(ids), half):
        if start == half:
            restored = [_restored(loaded, run, ids, half) for run in runs]
        following = targets[start + 1 : end + 1]
        if not len(following):
            break
        native = runs[0].logits(ids, start, end)
        for number, (run, score) in enumerate(zip(runs, scores, strict=True)):
            logits = native if number == 0 else run.logits(ids, start, end)
            rows = slice(0, len(following))
            score.whole.add(native[rows], logits[rows], following)
            if restored:
                score.second.add(native[rows], logits[rows], following)
                back = restored[number].logits(ids, start, end)
                score.restored.add(native[rows], back[rows], following)
                score.restored.num_equal += int((back == logits)[rows].all(-1).sum())


def _chunks(count: int, half: int) -> Iterator[tuple[int, int]]:
    for first, last in ((0, half), (half, count)):
        for start in range(first, last, CHUNK_TOKENS):
            yield start, min(start + CHUNK_TOKENS, last)


def _restored(loaded: LoadedModel, run: Run, ids: np.ndarray, num_tokens: int) -> Run:
    """Return a run whose first `num_tokens` are loaded from a reopened store that `run` was saved to."""
    layout = run.arena.layout
    copy = Run(loaded, layout, len(ids))
    size = layout.block_tokens
    root = root_hash(fingerprint=loaded.spec.fingerprint, namespace="eval", cache_salt="", secret=b"eval")
    first = ids[:num_tokens]
    hashes = chain_hashes(root, first, size)
    with tempfile.TemporaryDirectory(prefix="rekindle-eval-") as directory:
        with _store(Path(directory), loaded, layout) as store:
            for index, block_hash in enumerate(hashes):
                part = first[index * size : (index + 1) * size]
                identity = BlockIdentity(block_hash, hashes[index - 1] if index else root, root, part)
                payloads = {part.index: np.empty(part.payload_bytes, dtype=np.uint8) for part in layout.parts}
                run.arena.copy_out([BlockPart(index, part, size, out) for part, out in payloads.items()])()
                while not store.stage(BlockBytes(identity, payloads)):
                    store.flush(LOAD_S)
            store.flush(LOAD_S)
        with _store(Path(directory), loaded, layout) as store:
            found = store.locate(hashes, parent=root, ids=first)
            loaded_blocks, finished = [0], Event()

            def done(num_good: int) -> None:
                loaded_blocks[0] = num_good
                finished.set()

            store.load(found, partial(_deliver, copy.arena), done)
            finished.wait(LOAD_S)
            if loaded_blocks[0] < len(hashes):
                raise StoreError(f"only {loaded_blocks[0]} of {len(hashes)} blocks came back from the temporary store")
    return copy


def _deliver(arena: KVArena, first: int, run: Sequence[Mapping[int, Bytes]]) -> None:
    size = arena.layout.block_tokens
    arena.copy_in(
        [
            BlockPart(block, part, size, payload)
            for block, payloads in enumerate(run, first)
            for part, payload in payloads.items()
        ]
    )


@contextmanager
def _store(directory: Path, loaded: LoadedModel, layout: KVLayout) -> Iterator[WarmStore]:
    settings = StoreSettings(dir=directory)
    store = WarmStore.open(directory, fingerprint=loaded.spec.fingerprint, layout=layout, settings=settings)
    try:
        store.start()
        yield store
    finally:
        store.close()
