"""In which format linear layers keep their weights (the setting `weights`), and why.

Owns the decision and what it is based on. `auto` takes int8 only if a self-check says that it costs next to nothing:
one forward over a fixed text with the checkpoint's own weights, one with those in int8, and the distributions of the
next token compared at every position. The decision is saved once per model, as the formats of K and V are: it is part
of the fingerprint, and must not flip between two starts. int4 is never taken but on request. What bitsandbytes leaves
alone next to its own layers is packed, experts in as many bits, the head as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from rekindle.compute.cpu import experts, packed
from rekindle.compute.cpu.packer import Packed, Packer
from rekindle.errors import ConfigError
from rekindle.layer_forms import WeightFormat
from rekindle.model import bnb_linears
from rekindle.model.adapter import run_model
from rekindle.model.check_text import text_ids
from rekindle.model.dense_attention import DenseStep
from rekindle.model.divergence import Divergence, divergence
from rekindle.model.fingerprint import write_json
from rekindle.model.gguf_grids import FileGrid
from rekindle.model.loader import storage_bytes

Weights = Literal["native", "int8", "int4", "bnb-4bit", "bnb-8bit"]
Held = Weights | Literal["codes"]  # those of a file, which are what `native` means of it
Setting = Held | Literal["auto"]
NO_GRIDS: Mapping[str, FileGrid] = MappingProxyType({})
# What our kernels pack linear layers and experts in.
PACKED: dict[Held, tuple[WeightFormat, WeightFormat]] = {
    "native": ("bf16", "bf16"),
    "codes": ("int8", "int8"),  # what is on no grid
    "int8": ("int8", "int8"),
    "int4": ("int4", "int4"),
    "bnb-8bit": ("bf16", "int8"),
    "bnb-4bit": ("bf16", "int4"),
}
MOST_TOKENS = 512
# Of the distributions of next tokens: mean KL in nats, and how often the largest logit is the same one.
MAX_KL, LEAST_AGREEMENT = 0.002, 0.99
DECISION_VERSION = 1


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """The format, and the reason in words if a self-check or a lack of kernels is one."""

    weights: Held
    reason: str = ""


def verdict(found: Divergence) -> WeightsChoice:
    """Choose int8 where it stays within the bounds; numbers that are not finite do not."""
    if found.kl <= MAX_KL and found.agreement >= LEAST_AGREEMENT:
        return WeightsChoice("int8", f"passed the self-check: {found}")
    return WeightsChoice("native", f"int8 changes too much: {found}")


@dataclass(frozen=True, slots=True, eq=False)
class Linears:
    """The linear layers of a model, of which a pass has `called` some (`packed.observed_linears`), and what packs them.

    They are on the processor; with a packer of another device all of the model goes there once they are packed.
    """

    model: Any
    called: set[torch.nn.Module]
    packer: Packer | None

    def decided(self, setting: Setting, saved: Path | None) -> WeightsChoice | None:
        """Return the format by the setting; with `auto` the decision in the file `saved`, None if there is none yet."""
        if setting == "native":
            return WeightsChoice("native")
        if setting != "auto":
            return WeightsChoice(setting)
        if self.packer is None:
            return WeightsChoice("native", "int8 needs the kernels for the CPU")
        return _read(saved)

    def choose(self, setting: Setting, directory: Path, max_context: int, saved: Path | None) -> WeightsChoice:
        """Return the format that is `decided`, or else by the self-check, whose decision is saved.

        `directory` is the model's, which has the tokenizer.
        """
        known = self.decided(setting, saved)
        if known is None:
            assert self.packer is not None  # it would be decided
            found = self._measured(self.packer, check_ids(directory, max_context))
            if found is None:
                return WeightsChoice("native", "no linear layer is in bf16")
            known = verdict(found)
            if saved is not None:
                write_json(saved, {"version": DECISION_VERSION, **asdict(known)})
        return known

    def _measured(self, packer: Packer, ids: torch.Tensor) -> Divergence | None:
        """Compare the distributions of next tokens; None if no layer can be in int8. The model is as before."""
        own = self._logits(ids)
        with (
            packed.packed_for_trial(self.model, packer, self.called) as num_linears,
            experts.packed_for_trial(self.model, packer) as num_experts,
        ):
            if not num_linears + num_experts:
                return None
            return divergence(own, self._logits(ids))

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [ids, vocab] over attention with true K and V, in the model's dtype."""
        at = torch.arange(len(ids))
        with torch.inference_mode():
            return run_model(self.model, DenseStep(), ids[None], at[None], at)

    def pack(self, chosen: WeightsChoice, grids: Mapping[str, FileGrid] = NO_GRIDS) -> list[str]:
        """Pack the layers that were called, and experts, and free the originals; return notes for the banner.

        `grids`: the codes of a file, which are kept where its own form is chosen. ConfigError if no layer of the model
        can be in the format that is chosen.
        """
        of_linears, of_experts = PACKED[chosen.weights]
        if self.packer is None or of_linears not in self.packer.formats:
            return self.described(chosen)
        codes = grids if chosen.weights == "codes" else None
        notes = packed.pack_linears(self.model, self.packer, self.called, of_linears, codes)
        notes += experts.pack_experts(self.model, self.packer, of_experts)
        if self.packer.device.type == "cpu":
            packed.release_files(self.model)
        else:
            self.model.to(self.packer.device)
        return [*notes, *self.described(chosen)]

    def described(self, chosen: WeightsChoice) -> list[str]:
        """Return notes on the format of packed weights; ConfigError if it was asked for and no layer can be in it."""
        if chosen.weights == "native":
            return [f"weights: native ({chosen.reason})"] if chosen.reason else []
        if bnb_linears.is_bnb(chosen.weights):
            return self._described_bnb(chosen.weights)
        held = (*packed.packed_weights(self.model), *experts.packed_weights(self.model))
        found = {each.address: each for each in held}.values()
        rounded = [each for each in found if each.format != "bf16"]
        if not rounded:
            raise ConfigError(
                f"weights={chosen.weights} has no effect on this model: it is for linear layers in bf16 (dtype=bf16)"
            )
        num_bytes, in_bf16 = sum(x.num_bytes for x in rounded), sum(2 * x.columns * x.depth for x in rounded)
        if chosen.weights == "codes":
            return [_described_codes(rounded)]
        asked = [each for each in rounded if each.format == chosen.weights]
        number = f"{len(asked)} of {len(found)} packed layers in {chosen.weights}"
        if len(asked) < len(rounded):
            number += f", {len(rounded) - len(asked)} in int8 (the head, and what int4 does not suit)"
        reason = f" ({chosen.reason})" if chosen.reason else ""
        notes = [f"weights: {number}, {num_bytes:,} bytes where bf16 takes {in_bf16:,}{reason}"]
        return [*notes, *self._wide_experts()]

    def _described_bnb(self, weights: bnb_linears.BnbWeights) -> list[str]:
        """Return notes on layers of bitsandbytes, and on experts, which it leaves."""
        layers = bnb_linears.layers(self.model)
        if not layers:
            raise ConfigError(f"weights={weights} has no effect on this model: it has no linear layers but its head")
        num_bytes, in_bf16 = bnb_linears.num_bytes(layers), sum(2 * x.in_features * x.out_features for x in layers)
        notes = [f"weights: {len(layers)} linear layers in {weights}, {num_bytes:,} bytes where bf16 takes {in_bf16:,}"]
        rounded = [each for each in experts.packed_weights(self.model) if each.format != "bf16"]
        if rounded:
            formats = " and ".join(sorted({each.format for each in rounded}))
            num_bytes, in_bf16 = sum(x.num_bytes for x in rounded), sum(2 * x.columns * x.depth for x in rounded)
            notes.append(
                f"weights: {len(rounded)} matrices of experts, which are not for bitsandbytes, in {formats}, "
                f"{num_bytes:,} bytes where bf16 takes {in_bf16:,}"
            )
        return [*notes, *self._wide_experts(", which are not for bitsandbytes,")]

    def _wide_experts(self, why: str = "") -> list[str]:
        """A note on experts that nothing packs here, if there are any."""
        left = experts.wide_bytes(self.model)
        return [f"weights: experts{why} stay as they are, in {left:,} bytes"] if left else []


def _described_codes(held: Sequence[Packed]) -> str:
    own = [each for each in held if each.format.startswith("grid")]
    others = f", the others in int8 in {sum(each.num_bytes for each in held if each not in own):,}"
    return (
        f"weights: {len(own)} of {len(held)} packed layers keep the file's own codes, in "
        f"{sum(each.num_bytes for each in own):,} bytes{others if len(own) < len(held) else ''}"
    )


def _read(saved: Path | None) -> WeightsChoice | None:
    """The saved decision, if there is one that can be read."""
    if saved is None or not saved.is_file():
        return None
    try:
        stored: Any = json.loads(saved.read_text("utf-8"))
        known = WeightsChoice(stored["weights"], str(stored["reason"]))
        whole = stored["version"] == DECISION_VERSION and known.weights in ("native", "int8")
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return known if whole else None


def check_ids(directory: Path, max_context: int) -> torch.Tensor:
    """The text of the self-check as ids, at most 512 of them and, but for the shortest contexts, a multiple of four.

    ModelRefused if the directory's tokenizer.json cannot be used.
    """
    ids = text_ids(directory)
    count = min(len(ids), MOST_TOKENS, max_context)
    return ids[: max(count // 4 * 4, 1)]


def loaded_bytes(model: Any) -> int:
    """Bytes of all parameters, of packed weights and of what bitsandbytes keeps next to its own, each storage once."""
    held = (*packed.packed_weights(model), *experts.packed_weights(model))
    return storage_bytes(model, {each.address: each.num_bytes for each in held})
