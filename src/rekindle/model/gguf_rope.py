"""The rotary embedding of a GGUF file as transformers' `rope_parameters`.

Owns what the keys `<architecture>.rope.*` and the tensors of factors mean, by what llama.cpp computes from them
(llama-context.cpp, ggml_rope_ext). A key that is not known changes numbers, so it is refused by name.
"""

from __future__ import annotations

import math
from typing import Any

from rekindle.errors import ModelRefused
from rekindle.model.gguf_header import GgufHeader, shown, unreadable

FREQS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
DEFAULT_THETA = 10_000.0
SCALINGS = (None, "none", "linear", "yarn", "longrope")
KNOWN = frozenset(
    "freq_base freq_base_swa dimension_count dimension_count_swa dimension_sections scale_linear scaling.type "
    "scaling.factor scaling.attn_factor scaling.original_context_length scaling.finetuned scaling.yarn_ext_factor "
    "scaling.yarn_attn_factor scaling.yarn_beta_fast scaling.yarn_beta_slow".split()
)


def apply_rope(header: GgufHeader, config: Any) -> None:
    """Write what the file says into the config's `rope_parameters`; ModelRefused if it cannot be computed so.

    Where a config has parameters by the kind of layer, those of full attention are scaled, the others are not.
    """
    rope = _Rope(header)
    rope.check_keys()
    parameters = config.rope_parameters
    if "full_attention" not in parameters:
        config.rope_parameters = {**parameters, **rope.parameters(config)}
        return
    local = {**parameters.get("sliding_attention", {}), "rope_theta": rope.number("freq_base_swa") or DEFAULT_THETA}
    full = {**parameters["full_attention"], **rope.parameters(config)}
    config.rope_parameters = {**parameters, "full_attention": full, "sliding_attention": local}


class _Rope:
    """The keys of a file's rotary embedding."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self._prefix = f"{header.text('general.architecture')}.rope."

    def number(self, name: str) -> float | None:
        """The number under a key of the architecture."""
        return self._header.number(self._prefix + name)

    def check_keys(self) -> None:
        """Refuse a key or a tensor that is not known."""
        names = [key.removeprefix(self._prefix) for key in self._header.values if key.startswith(self._prefix)]
        unknown = [f"{self._prefix}{name}" for name in names if name not in KNOWN]
        tensors = [each.name for each in self._header.tensors if "rope_f" in each.name]
        unknown += [name for name in tensors if name not in (FREQS, LONG, SHORT)]
        if unknown:
            raise ModelRefused(
                f"{self._header.path}: {shown(unknown[0])} changes the rotary embedding in a way that is not computed "
                "here: choose another file of this model, or the original"
            )

    def parameters(self, config: Any) -> dict[str, Any]:
        """The parameters of layers with full attention."""
        scaling = self._header.text(self._prefix + "scaling.type")
        if scaling not in SCALINGS:
            raise ModelRefused(
                f"{self._header.path}: {self._prefix}scaling.type is '{shown(str(scaling))}', which is not computed "
                "here: choose another file of this model, or the original"
            )
        theta = self.number("freq_base") or DEFAULT_THETA
        common = {"rope_type": "default", "rope_theta": theta, **self._partial(config)}
        factor = self.number("scaling.factor") or self.number("scale_linear") or 1.0
        factor = 1.0 if scaling == "none" else factor
        attention = self.number("scaling.attn_factor") or 1.0
        if scaling == "yarn" and self._header.tensor(LONG) is None:
            return {**common, **self._yarn(config, factor, attention)}
        factors = self._factors(factor)
        if factors is not None:
            longest = int(config.max_position_embeddings)
            original = int(self.number("scaling.original_context_length") or longest) if SHORT in factors else longest
            return {
                **common,
                "rope_type": "longrope",
                "long_factor": factors[LONG],
                "short_factor": factors.get(SHORT, factors[LONG]),
                "factor": longest / original,
                "attention_factor": attention,
                "original_max_position_embeddings": original,
            }
        self._refuse_unless(attention == 1.0, "scaling.attn_factor")
        return {**common, "rope_type": "linear", "factor": factor} if factor != 1.0 else common

    def _factors(self, factor: float) -> dict[str, list[float]] | None:
        """By what each frequency is divided, for long and for short prompts; None: by nothing."""
        names = {FREQS: LONG, LONG: LONG, SHORT: SHORT}
        found = {names[name]: tensor for name in names if (tensor := self._header.tensor(name)) is not None}
        if SHORT in found and LONG not in found:
            raise unreadable(self._header.path, f"it has {SHORT} without {LONG}")
        return {name: (self._header.floats(tensor) * factor).tolist() for name, tensor in found.items()} or None

    def _yarn(self, config: Any, factor: float, attention: float) -> dict[str, Any]:
        """YaRN (Peng et al. 2023) with its defaults where the file says nothing."""
        self._refuse_unless(self.number("scaling.yarn_ext_factor") in (None, 1.0), "scaling.yarn_ext_factor")
        self._refuse_unless(self._header.tensor(FREQS) is None, "scaling.type with rope_freqs.weight")
        own = self.number("scaling.yarn_attn_factor") or (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": int(
                self.number("scaling.original_context_length") or config.max_position_embeddings
            ),
            "attention_factor": own * attention,
            "beta_fast": self.number("scaling.yarn_beta_fast") or 32.0,
            "beta_slow": self.number("scaling.yarn_beta_slow") or 1.0,
        }

    def _partial(self, config: Any) -> dict[str, float]:
        """Which part of a head is rotated, where it is not all of it."""
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        part = (self.number("dimension_count") or head) / head
        stated = "partial_rotary_factor" in config.rope_parameters
        return {"partial_rotary_factor": part} if stated or part != 1 else {}

    def _refuse_unless(self, fits: bool, name: str) -> None:
        if not fits:
            raise ModelRefused(
                f"{self._header.path}: {self._prefix}{name} asks for a rotary embedding that is not computed here: "
                "choose another file of this model, or the original"
            )
