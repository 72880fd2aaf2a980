"""A loaded model as a value, and what computes it: all that the others know of a device and its kernels.

Reads no files and runs nothing. What packs weights and has kernels of its own stands elsewhere and is chosen when a
model is loaded.

    Compute.arena  ──▶ KVArena: copy_out, copy_in (blocks, many at a time, between the device and the host)
       └─▶ runner  ──▶ Runner.launch(sequence steps) ──▶ Step: draw, wait, logits
                        begins on the device
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from rekindle.cache.blocks.windows import WindowSlots
from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention
from rekindle.kv.plan import ROW_MULTIPLE
from rekindle.model.batch import SequenceStep
from rekindle.model.device import Memory
from rekindle.model.drawing import Drawing
from rekindle.model.sampler import Draw
from rekindle.spec import KVLayout, ModelSpec

if TYPE_CHECKING:  # with it comes what models are made of in transformers, and an engine in front of a server has none
    from rekindle.model.formats import LayerFormats
    from rekindle.model.vision import Vision

Promise = Literal["bitwise", "close", "none"]  # of the same ids on different paths: see selftest
BY_TORCH = "torch"


class Step(Protocol):
    """A step that was launched; the next one is launched after this one was waited for, unless by `launch_after`."""

    def wait(self) -> frozenset[int]:
        """Wait until all is computed and stored; the indices of sequence steps whose KV or logits are not finite."""

    @property
    def logits(self) -> torch.Tensor:
        """Logits [requested rows, vocab], fp32 (fp64 if the model is), in the order of the sequence steps."""

    def draw(self, draws: Sequence[Draw]) -> Drawing:
        """Begin to draw tokens from rows of the logits; what began before `wait` has come with it."""


class Runner(Protocol):
    """Computes the steps of one model over one arena; used by one thread."""

    model_s: float  # seconds so far in which steps were launched and waited for

    def launch(self, steps: Sequence[SequenceStep]) -> Step:
        """Begin a step; K and V of all rows at positions `num_stored` and later will be in the arena."""

    @property
    def computes_ahead(self) -> bool:
        """Whether a step can be launched before the last one was waited for, and gains from it."""

    def launch_after(self, steps: Sequence[SequenceStep], drawing: Drawing, places: Sequence[int]) -> Step:
        """As `launch`, of steps of one row whose ids, in place of their own, are those that are being drawn at these
        places of a drawing. Only if it `computes_ahead`."""

    def forward(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Launch a step and wait for it: its logits."""

    def rest(self) -> None:
        """As `Compute.rest`."""


class Compute(Protocol):
    """What computes: two that are equal give the same bits."""

    @property
    def level(self) -> str:
        """Its name."""

    @property
    def digest(self) -> str | None:
        """What the bits depend on of code that is not the core's Python; None if there is none."""

    @property
    def computes_ahead(self) -> bool:
        """Whether its steps are computed while the host does something else."""

    def memory(self, device: str) -> Memory:
        """The memory of the device now."""

    def arena(
        self, layout: KVLayout, num_blocks: int, device: torch.device | str, windows: Sequence[WindowSlots] = ()
    ) -> KVArena:
        """Hot memory of `num_blocks` blocks, all zero, for `attention` and `runner`; `windows` as of `KVArena`."""

    def attention(self, arena: KVArena) -> PagedAttention:
        """Attention over the blocks of an arena, for modules of transformers."""

    def fuse(self, loaded: LoadedModel) -> int:
        """Compute layers of a model by kernels in place of their own code, where they give the same; how many."""

    def runner(self, loaded: LoadedModel, arena: KVArena) -> Runner:
        """What serves a model, and is what its proof runs."""

    def rest(self) -> None:
        """Give back what a thread that computes holds: the calling one has nothing to compute for now."""


class Unsaved(Protocol):
    """What a start made of a model's weights and later starts can do without, if it is written to a file."""

    def save(self, is_stopped: Callable[[], bool] = ...) -> None:
        """Write it, unless stopped; what goes wrong is logged."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, its spec, and what was found while loading."""

    model: Any
    spec: ModelSpec
    directory: Path
    device: str
    dtype: torch.dtype
    promise: Promise
    formats: tuple[LayerFormats, ...]
    compute: Compute
    notes: tuple[str, ...]  # for the banner
    row_multiple: int = ROW_MULTIPLE  # of the rows of a step
    is_steady: bool = False  # as in `Proof`
    unsaved: Unsaved | None = None  # to be written to a file for later starts
    vision: Vision | None = None  # of a model whose pictures are read
