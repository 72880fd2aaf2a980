"""In which form a model's weights fit on a card, and what computes them if they do not: `with_room`.

Owns what `weights=auto` means on a card: the checkpoint's own form if there is room for it, else 8 bits, else 4. What
is to be rounded is loaded to the processor and goes to the card layer by layer: wide weights need no room there.
Sizes are estimates from headers and the config: embeddings and experts stay as they are, a head takes 8 bits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rekindle.compute.cpu.weights import Weights
from rekindle.compute.devices import Chosen, processor
from rekindle.config import ModelSettings, show_bytes
from rekindle.errors import ModelRefused
from rekindle.model.checkpoint import expert_share, weight_files
from rekindle.model.checkpoint_form import CheckpointForm
from rekindle.model.refusals import refuse_by_config, text_config

ROUNDED: dict[Weights, str] = {"int8": "8 bits", "int4": "4 bits"}
# Of the bytes that a linear layer takes in bf16; int4 has a byte for every 32 values.
SHARES: dict[Weights, float] = {"int8": 0.5, "int4": 0.25 + 1 / 64}


def with_room(
    chosen: Chosen, settings: ModelSettings, directory: Path, config: Any, compute_dtype: torch.dtype | None
) -> Chosen:
    """What computes the weights in this directory, and in which form where the settings leave that open.

    The processor where a card that `auto` chose has room for no form that the settings allow; ModelRefused if a card
    that was named has not. In their own form weights are refused where they are loaded.
    """
    is_own = settings.weights not in (*ROUNDED, "auto")
    if chosen.device == "cpu" or (settings.device != "auto" and is_own):
        return chosen
    files, most = weight_files(directory), chosen.memory.weight_bytes
    form = CheckpointForm.of(files, config, chosen.named(settings))
    own = form.needed_bytes(form.wanted_dtype(compute_dtype)[0])
    rounded = rounded_bytes(files, config, settings, compute_dtype) if chosen.packer is not None else {}
    if settings.weights in ROUNDED and rounded.get(settings.weights, 0) <= most:
        return chosen  # what cannot be packed is refused later
    if settings.weights not in ROUNDED and own <= most:
        return replace(chosen, weights="native") if chosen.packer is not None else chosen
    fitting = next((weights for weights, num_bytes in rounded.items() if num_bytes <= most), None)
    takes = f"take {show_bytes(own)}, and"
    if settings.weights == "auto" and fitting is not None:
        why = f"in {ROUNDED[fitting]}, as in their own form they {takes} there is room for {show_bytes(most)}"
        return replace(chosen, weights=fitting, why_rounded=why)
    if not is_own and rounded:
        last = settings.weights if settings.weights in ROUNDED else "int4"
        takes = f"take {show_bytes(rounded[last])} in {ROUNDED[last]}, and"
    if settings.device != "auto" and not is_own and rounded:
        raise ModelRefused(f"the weights {takes} {chosen.device} has room for {show_bytes(most)}: take a smaller model")
    if settings.device != "auto":
        return chosen
    advice = f" (weights={fitting} would fit)" if fitting is not None else ""
    refuse_by_config(config, "cpu")
    return processor(settings, f"the weights {takes} it has room for {show_bytes(most)}{advice}")


def rounded_bytes(
    files: list[Path], config: Any, settings: ModelSettings, compute_dtype: torch.dtype | None
) -> dict[Weights, int]:
    """What they take on a card in 8 and in 4 bits; nothing if no layer is in bf16 once a processor has them."""
    form, text = CheckpointForm.of(files, config, replace(settings, device="cpu")), text_config(config)
    dtype, _ = form.wanted_dtype(compute_dtype)
    loaded = dtype if isinstance(dtype, torch.dtype) else form.dtype
    if loaded != torch.bfloat16 or (form.method is not None and not form.is_widened):
        return {}
    wide, values = form.needed_bytes(torch.bfloat16), int(text.vocab_size) * int(text.hidden_size)
    experts = int(wide * expert_share(files))
    linear = max(0, wide - experts - 2 * values * (1 if text.tie_word_embeddings else 2))
    return {name: 3 * values + experts + int(linear * share) for name, share in SHARES.items()}
