"""The trial at load, of what will be served: does our path give the results of the model's own attention?

Three sequences of real text, packed and in two chunks over blocks, against the model's own code. Roundings grow from
layer to layer; how far depends on the weights and on the text, and weights packed in 8 bits round once more. So two
things are compared:

    every attention call   on what it is given where all calls before gave the right results, so that no earlier
                           rounding is in it: a mask, scale, window, position or rotation that is not passed on shows
    the last logits        of all that serves (kernels, fused layers, packed weights), each going its own way; not of
                           a sequence that is long for the sake of a window, for which eager attention takes seconds

The bounds are the model's own: how far its eager attention, in its dtype, is from the same in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from rekindle.errors import ModelRefused
from rekindle.kv.attention import PagedAttention
from rekindle.kv.plan import AttentionPlan
from rekindle.model.adapter import ATTENTION_NAME, AttentionCall
from rekindle.model.batch import SequenceStep
from rekindle.model.check_text import checked_ids
from rekindle.model.divergence import row_divergences
from rekindle.model.loaded import BY_TORCH, LoadedModel, Runner
from rekindle.model.own_attention import OWN_NAME, OwnPass, distances, own_logits, register_own_attention
from rekindle.model.runner import ModelRunner, PagedStep

TRIAL_LENGTHS = (11, 70, 37)
TRIAL_WINDOW_LIMIT = 512  # windows up to here are crossed by the longest trial sequence
BEYOND, BEYOND_SHARE = 9, 4  # by so many tokens, and by this part of the window
LAST_ROWS = 16  # of a sequence: its second chunk, whose logits are compared
# Allowed is a multiple of what the model's own attention rounds, and a little where that is next to nothing. Measured
# on two real models and 56 tiny ones, as shares of what is allowed: at most 0.43 in bf16 and int8, 0.03 in fp32; an
# angle that is a hundredth of a position too far, a window an eighth too short, a sink twice as large: 4.9 and more.
# One row may be far where values cancel, or where a rounding sends a token to another expert. KL grows with the square
# of a difference, and so does what is allowed: over weights in 4 bits that of one rounding of the embeddings is 0.008
# or 0.04, by which of them are rounded up.
MULTIPLE = 3.0
LEAST, LEAST_ROUNDED = {torch.float64: 1e-6, torch.float32: 1e-4}, 0.005  # of the median row, and of logits
FURTHEST = 10.0  # times as much, of the furthest row of attention
Logits = Literal["none", "last", "all"]
LOGITS: tuple[Logits, ...] = ("none", "all")  # of each chunk
NOT_FINITE = "the trial forward gives numbers that are not finite: broken weights, or too narrow a dtype"
Chunk = Sequence[tuple[int, int]]  # start and end of the rows of each sequence
StepType = Callable[[PagedAttention, AttentionPlan], PagedStep]


def trial_forward(loaded: LoadedModel, dtype: torch.dtype) -> None:
    """Refuse a model, given with native KV of `dtype`, unless our path gives the results of its own attention."""
    register_own_attention()
    sequences = _trial_sequences(loaded)
    least = LEAST.get(dtype, LEAST_ROUNDED)
    if loaded.spec.layout.states:  # recurrent layers compute in fp32 in any dtype, and here in other pieces
        least = max(least, LEAST[torch.float32])
    passes = [OwnPass() for _ in sequences]
    exact = _own_logits(loaded.model, OWN_NAME, sequences, passes)
    if not all(torch.isfinite(rows).all() for rows in exact):
        raise ModelRefused(NOT_FINITE)
    for number, (ours, own) in enumerate(_compared_calls(loaded, sequences, passes), 1):
        for name, each, allowed in (("median", torch.median, least), ("furthest", torch.max, FURTHEST * least)):
            _judge(loaded, f"{name} row of attention call {number}", float(each(ours)), float(each(own)), allowed)
    short = [index for index, ids in enumerate(sequences) if len(ids) <= max(TRIAL_LENGTHS)]
    sequences, right = [sequences[index] for index in short], torch.cat([exact[index] for index in short])
    rounded = torch.cat(_own_logits(loaded.model, "eager", sequences, [None] * len(sequences)))
    served = _packed_logits(loaded, sequences)
    for name, compare, multiple in (("difference", row_errors, MULTIPLE), ("KL", row_divergences, MULTIPLE**2)):
        ours_median, own_median = (float(compare(logits, right).median()) for logits in (served, rounded))
        _judge(loaded, f"{name} of the median row of logits", ours_median, own_median, least, multiple)


def _judge(loaded: LoadedModel, what: str, ours: float, own: float, least: float, multiple: float = MULTIPLE) -> None:
    allowed = multiple * own + least
    if not ours <= allowed:
        raise ModelRefused(
            f"{type(loaded.model).__name__}: packed sequences over paged KV give other results than the model's own "
            f"attention ({what}: {ours:.2g}, its own roundings {own:.2g}, allowed {allowed:.2g})",
            remedy=_remedy(loaded),
        )


def _remedy(loaded: LoadedModel) -> str:
    """What may serve the model: kernels that do not compute, and roundings that are not made."""
    ways = ["kernels=torch computes without our kernels"] if loaded.compute.level != BY_TORCH else []
    if loaded.dtype not in LEAST:
        ways.append("dtype=fp32 without roundings to 16 bits")
    if not ways:
        return "it does something in its attention that is not passed on"
    return f"{', '.join(ways)}; a model that is refused then, too, does something there that is not passed on"


def row_errors(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Per row [rows, vocab], the root mean square of the difference over that of `theirs` around its mean."""
    reference = theirs.double()
    spread = (reference - reference.mean(-1, keepdim=True)).square().mean(-1)
    return ((ours.double() - reference).square().mean(-1) / spread.clamp_min(1e-30)).sqrt()


def _trial_sequences(loaded: LoadedModel) -> list[torch.Tensor]:
    """Three sequences of the check's text; one is longer than the longest window, if that is not too long.

    Pseudo-random ids if the model's directory has no tokenizer, or one with more tokens than the model.
    """
    spec = loaded.spec
    windows = [layer.window for layer in spec.layout.layers if layer.window and layer.window <= TRIAL_WINDOW_LIMIT]
    longest = max([*TRIAL_LENGTHS, *(window + max(BEYOND, window // BEYOND_SHARE) for window in windows)])
    lengths = [min(length, spec.max_context) for length in (TRIAL_LENGTHS[0], longest, TRIAL_LENGTHS[2])]
    count = sum(lengths)
    ids = checked_ids(loaded.directory, spec.vocab_size, count)
    return list(ids.repeat(-(-count // len(ids)))[:count].split(lengths))


def _chunks(sequences: Sequence[torch.Tensor]) -> tuple[Chunk, Chunk]:
    """The rows of the first chunk and of the second, which has the last rows of every sequence."""
    lengths = [len(ids) for ids in sequences]
    cuts = [max(length * 3 // 5, length - LAST_ROWS) for length in lengths]
    return [(0, cut) for cut in cuts], list(zip(cuts, lengths, strict=True))


def _own_logits(
    model: Any, attention: str, sequences: Sequence[torch.Tensor], passes: Sequence[OwnPass | None]
) -> list[torch.Tensor]:
    """The logits of the second chunk of each sequence by the model's own code, one sequence after the other."""
    counts = [end - start for start, end in _chunks(sequences)[-1]]
    try:
        model.set_attn_implementation(attention)
        return [own_logits(model, *each) for each in zip(sequences, counts, passes, strict=True)]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


class _ForcedStep(PagedStep):
    """Compares the output of each attention call, and returns the right one to the layer."""

    def __init__(
        self, paged: PagedAttention, plan: AttentionPlan, *, right: Iterator[torch.Tensor], found: list[torch.Tensor]
    ) -> None:
        super().__init__(paged, plan)
        self._right, self._found = right, found

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the right rows, and dummies as they are."""
        attended, right = super().attend(call), next(self._right)
        self._found.append(distances(attended[: len(right)], right))
        return torch.cat((right.to(attended.dtype), attended[len(right) :]))


def _compared_calls(
    loaded: LoadedModel, sequences: Sequence[torch.Tensor], passes: Sequence[OwnPass]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each attention call, how far its rows and heads are from `exact`: all of ours, and last ones of its own."""
    chunks = _chunks(sequences)
    calls = list(zip(*(each.calls for each in passes), strict=True))
    found: list[list[torch.Tensor]] = [[] for _ in chunks]

    def steps_of(chunk: Chunk, ours: list[torch.Tensor]) -> StepType:
        right = [torch.cat([x.exact[slice(*rows)] for x, rows in zip(call, chunk, strict=True)]) for call in calls]
        return partial(_ForcedStep, right=iter(right), found=ours)

    _packed_logits(loaded, sequences, [steps_of(*each) for each in zip(chunks, found, strict=True)])
    own = (torch.cat([x.rounding for x in call]) for call in calls)
    return [(torch.cat(ours), rounding) for *ours, rounding in zip(*found, own, strict=True)]


def _packed_logits(
    loaded: LoadedModel,
    sequences: Sequence[torch.Tensor],
    step_types: Sequence[StepType] | None = None,
) -> torch.Tensor:
    """The logits of the second chunk, all sequences together over interleaved blocks: by what serves the model, or by
    torch with steps of these types, one a chunk."""
    layout = loaded.spec.layout
    tables, num_blocks = interleaved_tables(layout.block_tokens, [len(ids) for ids in sequences])
    arena = loaded.compute.arena(layout, num_blocks, loaded.device)
    logits = torch.empty(0)
    types = step_types or (None, None)
    for chunk, step_type, asked in zip(_chunks(sequences), types, LOGITS, strict=True):
        runner: Runner = (
            loaded.compute.runner(loaded, arena)
            if step_type is None
            else ModelRunner(loaded, arena, step_type=step_type)
        )
        given = [each for each in zip(sequences, chunk, tables, strict=True) if each[1][1] > each[1][0]]
        steps = [sequence_step(ids[start:end], start, table, asked) for ids, (start, end), table in given]
        step = runner.launch(steps)
        logits = step.logits
        if step.wait():
            raise ModelRefused(NOT_FINITE)
    return logits


def sequence_step(ids: torch.Tensor, start: int, blocks: Sequence[int], logits: Logits) -> SequenceStep:
    return SequenceStep(ids.numpy().astype(np.uint32), start, blocks, start, logits)


def interleaved_tables(block_tokens: int, lengths: Sequence[int]) -> tuple[list[list[int]], int]:
    """Block lists for sequences of these lengths, interleaved so that no sequence is contiguous; blocks in all."""
    counts = [-(-length // block_tokens) for length in lengths]
    tables: list[list[int]] = [[] for _ in lengths]
    block = 0
    for turn in range(max(counts)):
        for index, count in enumerate(counts):
            if turn < count:
                tables[index].append(block)
                block += 1
    return [table[::-1] for table in tables], block
