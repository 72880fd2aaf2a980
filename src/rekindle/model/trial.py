"""The trial forward at load, on the loaded weights: does our path give the model's own logits?

Three sequences of different lengths, packed and in two chunks, through our path with native KV, against the model's own
eager attention; the model is refused if the logits differ. This finds errors that names and flags do not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from rekindle.errors import ModelRefused
from rekindle.kv.arena import KVArena
from rekindle.model.adapter import ATTENTION_NAME
from rekindle.model.batch import SequenceStep
from rekindle.model.formats import check_tokens
from rekindle.model.loaded import LoadedModel
from rekindle.model.refusals import text_config
from rekindle.model.runner import ModelRunner
from rekindle.spec import ModelSpec

TRIAL_LENGTHS = (11, 70, 37)
TRIAL_WINDOW_LIMIT = 256  # windows up to here are crossed by the longest trial sequence
# Relative differences allowed; eager softmax is fp32 in every dtype. Measured: fp32 2e-6, bf16 0.005 to 0.04 (dense).
# In mixtures a rounding can send a token to another expert: single rows differ by up to 1, the median row by up to 0.1.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.1
MIXTURE_TOLERANCE = 0.25
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def trial_forward(loaded: LoadedModel, dtype: torch.dtype) -> None:
    """Refuse a model, given with native KV of `dtype`, unless our path gives the logits of its own attention."""
    sequences = _trial_sequences(loaded.spec)
    ours = _packed_logits(loaded, sequences)
    model = loaded.model
    try:
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            theirs = [model(input_ids=ids[None].to(model.device), use_cache=False).logits[0] for ids in sequences]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    errors = row_errors(torch.cat(ours), torch.cat(theirs))
    if any(getattr(text_config(model.config), name, None) for name in EXPERT_COUNTS):
        error, tolerance = float(errors.median()), MIXTURE_TOLERANCE
    else:
        error, tolerance = float(errors.square().mean().sqrt()), LOW_PRECISION_TOLERANCE
    tolerance = TOLERANCE.get(dtype, tolerance)
    if not error <= tolerance:
        raise ModelRefused(
            f"{type(model).__name__}: packed sequences over paged KV give other logits than the model's own attention "
            f"(relative difference {error:.2g}, allowed {tolerance:g}): it does something there that is not passed on"
        )


def row_errors(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Per row [rows, vocab], the root mean square of the difference over that of `theirs` around its mean."""
    reference = theirs.double()
    spread = (reference - reference.mean(-1, keepdim=True)).square().mean(-1)
    return ((ours.double() - reference).square().mean(-1) / spread.clamp_min(1e-30)).sqrt()


def _trial_sequences(spec: ModelSpec) -> list[torch.Tensor]:
    """Three token sequences; one is longer than the smallest window, if that is not too long."""
    windows = [layer.window for layer in spec.layout.layers if layer.window and layer.window <= TRIAL_WINDOW_LIMIT]
    longest = max([*TRIAL_LENGTHS, *(window + 9 for window in windows)])
    lengths = [min(length, spec.max_context) for length in (TRIAL_LENGTHS[0], longest, TRIAL_LENGTHS[2])]
    return list(check_tokens(spec.vocab_size, sum(lengths)).split(lengths))


def _packed_logits(loaded: LoadedModel, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of every position of each sequence, computed together in two chunks."""
    layout = loaded.spec.layout
    tables, num_blocks = interleaved_tables(layout.block_tokens, [len(ids) for ids in sequences])
    runner = ModelRunner(loaded, KVArena(layout, num_blocks, loaded.model.device))
    cuts = [max(1, len(ids) * 3 // 5) for ids in sequences]
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for bounds in ([(0, cut) for cut in cuts], [(cut, len(ids)) for cut, ids in zip(cuts, sequences, strict=True)]):
        chosen = [index for index, (start, end) in enumerate(bounds) if end > start]
        steps = [sequence_step(sequences[i][slice(*bounds[i])], bounds[i][0], tables[i], "all") for i in chosen]
        logits = runner.forward(steps)
        if runner.failed_steps:
            raise ModelRefused(
                "the trial forward gives numbers that are not finite: broken weights, or too narrow a dtype"
            )
        for index, rows in zip(chosen, logits.split([step.num_rows for step in steps]), strict=True):
            parts[index].append(rows)
    return [torch.cat(rows) for rows in parts]


def sequence_step(
    ids: torch.Tensor, start: int, blocks: Sequence[int], logits: Literal["none", "last", "all"]
) -> SequenceStep:
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
