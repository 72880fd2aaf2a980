"""Steps of few rows as graphs: what a step launches is recorded once and launched again by one call.

A processor takes longer to launch the thousands of kernels of a step than a card to compute them. Steps are padded to
buckets of rows, and their inputs and tables lie in one tensor (`tables.Sheet`) that is the same for every step of a
graph: a graph is one bucket and the room for its tables. The first step of a kind is computed as any other, so that
kernels are compiled; the second is recorded. Where that fails several times, steps are launched kernel by kernel for
good.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rekindle.errors import first_line
from rekindle.kv.arena import KVArena
from rekindle.kv.plan import AttentionPlan
from rekindle.kv.step_layout import StepLayout
from rekindle.model.adapter import run_model
from rekindle.model.batch import ForwardBatch
from rekindle.model.loaded import LoadedModel
from rekindle.model.runner import PagedStep
from rekindle_cuda.attention import TritonAttention
from rekindle_cuda.places import DTYPES
from rekindle_cuda.prompts import MOST_ROWS
from rekindle_cuda.runner import CardRunner
from rekindle_cuda.tables import Name, Sheet, Tables
from rekindle_cuda.work import FIELDS, PIECE_FIELDS

log = logging.getLogger(__name__)
LEAST_BUCKET = 4  # rows; torch multiplies fewer by other kernels
LEAST_BLOCKS, LEAST_ITEMS = 1024, 64  # that there is room for
MOST_GRAPHS = 48
MOST_FAILURES = 3  # of recording: there may be memory for it at the next try
INPUTS: tuple[Name, ...] = (("ids",), ("positions",), ("logit rows",))
Outputs = tuple[torch.Tensor, torch.Tensor]  # the largest magnitude in each row's K and V; logits


class Recorder(Protocol):
    """What records launches."""

    def record(self, function: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Record what a function launches: what launches it again, and the tensors that have the results then."""


class CudaGraphs:
    """Records CUDA's graphs of one card, which share memory: the results of one are lost when another one runs."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def record(self, function: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """As `Recorder.record`. Other threads may use the card meanwhile.

        Relaxed: kernels may be loaded. Triton never loads one again that it could not load once.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream = self._stream or torch.cuda.Stream()
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="relaxed"):
                found = function()
        except BaseException:
            torch.cuda.set_stream(before)
            pool, self._pool = self._pool, None
            end_recording(pool)
            raise
        return graph.replay, found


def end_recording(pool: Any) -> None:
    """End what torch leaves under way where a recording cannot be ended: the card's memory would stay the pool's, no
    other recording could have it, and unused memory would not be given back when there is too little."""
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # torch ended it
    torch._C._cuda_releasePool(device, pool)


@dataclass(frozen=True, slots=True)
class Graph:
    """A recorded step: the sheet that it reads, and where its results are."""

    sheet: Sheet
    launch: Callable[[], None]
    outputs: Outputs

    def run(self, tables: Tables, drawn: torch.Tensor | None) -> Outputs:
        """Launch it for other tables, with `drawn` ids in place of the first ones; copies of the results, which the
        next launch overwrites."""
        self.sheet.send(tables)
        if drawn is not None:
            self.sheet["ids",][: len(drawn)].copy_(drawn)
        self.launch()
        worst, logits = self.outputs
        return worst.clone(), logits.clone()


class GraphRunner(CardRunner):
    """A `CardRunner` that launches steps of few rows as graphs, for models that `can_be_recorded`."""

    def __init__(self, loaded: LoadedModel, arena: KVArena, recorder: Recorder) -> None:
        super().__init__(loaded, arena)
        assert isinstance(self._paged, TritonAttention)
        self._attention, self._recorder = self._paged, recorder
        self._graphs: OrderedDict[tuple[Any, ...], Graph | None] = OrderedDict()  # None: computed once
        self._num_failures = 0
        self.why_not: str | None = None

    def _filled(self, count: int) -> int:
        if self.why_not is not None or not 0 < count <= MOST_ROWS:
            return super()._filled(count)
        return max(LEAST_BUCKET, 1 << (count - 1).bit_length())

    def _compute_batch(self, batch: ForwardBatch, layout: StepLayout) -> tuple[PagedStep, torch.Tensor]:
        if self.why_not is not None or batch.num_rows > MOST_ROWS or batch.pictures:
            return super()._compute_batch(batch, layout)
        values = batch.input_ids, batch.position_ids, batch.logit_rows
        tables: Tables = {**dict(zip(INPUTS, values, strict=True)), **self._attention.tables(layout)}
        sizes = {name: _room(name, table, batch.num_rows) for name, table in tables.items()}
        key = tuple(sizes.items())
        is_first, graph = key not in self._graphs, self._graphs.pop(key, None)
        if graph is None and not is_first:
            graph = self._recorded(Sheet(sizes, self._device), tables, layout)
        if self.why_not is None:
            self._graphs[key] = graph  # the last one to be dropped
            while len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
        if graph is None:
            return super()._compute_batch(batch, layout)
        worst, logits = graph.run(tables, batch.drawn)
        return self._step_type(self._paged, AttentionPlan(layout, self._device, worst)), logits

    def _recorded(self, sheet: Sheet, tables: Tables, layout: StepLayout) -> Graph | None:
        """Record a step over this sheet; None where that cannot be done."""

        def compute() -> Outputs:
            plan = AttentionPlan(layout, self._device)
            self._attention.follow(plan, sheet)
            ids, positions, logit_rows = (sheet[name].long() for name in INPUTS)
            step = self._step_type(self._paged, plan)
            return plan.worst, run_model(self._model, step, ids[None], positions[None], logit_rows)

        sheet.send(tables)
        try:
            return Graph(sheet, *self._recorder.record(compute))
        except Exception as error:  # Border: whatever code of a model does that no graph can hold
            self._failed(f"{type(error).__name__}: {first_line(error)}")
            return None

    def _failed(self, why: str) -> None:
        self._num_failures += 1
        if self._num_failures < MOST_FAILURES:
            log.info("a step could not be recorded: %s", why)
            return
        self.why_not = why
        self._graphs.clear()
        log.warning("steps are launched kernel by kernel, which is slower: %s", why)


def can_be_recorded(loaded: LoadedModel) -> bool:
    """Whether all of a model's layers attend by kernels; states of recurrent layers are placed by the processor."""
    layout = loaded.spec.layout
    return loaded.dtype in DTYPES and not layout.states and not any(layer.latent for layer in layout.layers)


def _room(name: Name, table: np.ndarray, num_rows: int) -> int:
    """Numbers for which a sheet has room: as many for most contexts of a bucket of rows."""
    if name[0] == "contexts":
        return max(LEAST_BLOCKS, _power_of_two(table.size))
    if name[0] == "items":
        return FIELDS * max(LEAST_ITEMS, _power_of_two(len(table)))
    return PIECE_FIELDS * num_rows if name[0] == "pieces" else table.size


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0
