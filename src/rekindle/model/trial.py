"""The trial forward at load, on the loaded weights: does our path give the model's own logits?

Three sequences of real text, packed and in two chunks, through our path with native KV, against the model's own eager
attention; the model is refused if the logits of the median row differ. This finds errors that names and flags do not
show. The text matters: on ids drawn at random real weights amplify roundings, and a sound bf16 model is three times as
far from its own fp32 as it is on text.
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
from rekindle.model.check_text import text_ids
from rekindle.model.formats import check_tokens
from rekindle.model.loaded import LoadedModel
from rekindle.model.refusals import text_config
from rekindle.model.runner import ModelRunner
from rekindle.text.tokenizer import FILE_NAME

TRIAL_LENGTHS = (11, 70, 37)
TRIAL_WINDOW_LIMIT = 512  # windows up to here are crossed by the longest trial sequence
# Relative differences of the median row that are allowed; eager softmax is fp32 in every dtype. On text, in 16 and
# 8 bits: 0.058 for SmolLM2 and for Gemma 3, their default weights of GGUF files.
# In mixtures a rounding can send a token to another expert: single rows differ by up to 1, the median row by up to 0.1.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.1
MIXTURE_TOLERANCE = 0.25
REMEDY = (
    "kernels=torch computes without our kernels, dtype=fp32 without roundings to 16 bits; a model that is refused with "
    "both does something in its attention that is not passed on"
)
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def trial_forward(loaded: LoadedModel, dtype: torch.dtype) -> None:
    """Refuse a model, given with native KV of `dtype`, unless our path gives the logits of its own attention."""
    sequences = _trial_sequences(loaded)
    ours = _packed_logits(loaded, sequences)
    model = loaded.model
    try:
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            theirs = [model(input_ids=ids[None].to(model.device), use_cache=False).logits[0] for ids in sequences]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    error = float(row_errors(torch.cat(ours), torch.cat(theirs)).median())
    is_mixture = any(getattr(text_config(model.config), name, None) for name in EXPERT_COUNTS)
    tolerance = TOLERANCE.get(dtype, MIXTURE_TOLERANCE if is_mixture else LOW_PRECISION_TOLERANCE)
    if not error <= tolerance:
        raise ModelRefused(
            f"{type(model).__name__}: packed sequences over paged KV give other logits than the model's own attention "
            f"(relative difference {error:.2g}, allowed {tolerance:g}): {REMEDY}"
        )


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
    longest = max([*TRIAL_LENGTHS, *(window + 9 for window in windows)])
    lengths = [min(length, spec.max_context) for length in (TRIAL_LENGTHS[0], longest, TRIAL_LENGTHS[2])]
    count = sum(lengths)
    if (loaded.directory / FILE_NAME).is_file():
        ids = text_ids(loaded.directory)
        if int(ids.max()) < spec.vocab_size:
            return list(ids.repeat(-(-count // len(ids)))[:count].split(lengths))
    return list(check_tokens(spec.vocab_size, count).split(lengths))


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
