"""Decoder layers in one call: what their own code gives, the same bits on every path, and only where they fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

from rekindle.compute.cpu.compute import KernelCompute
from rekindle.compute.cpu.kernels import library
from rekindle.compute.cpu.kernels.levels import LEVELS
from rekindle.compute.cpu.packed import observed_linears
from rekindle.compute.cpu.weights import Linears, Weights, WeightsChoice
from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.model.fused_layers import FusedLayer
from rekindle.model.geometry import probe
from rekindle.model.loaded import LoadedModel
from rekindle.model.selftest import self_test
from rekindle.model.trial import row_errors, trial_forward
from tests.kernels.native import built, needs_kernels
from tests.model.helpers import Bench, in_memory, random_ids, randomise_norms
from tests.tiny_models import tiny_model

pytestmark = needs_kernels
BF16 = torch.bfloat16
FITTING = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
MIXTURES = ("mixtral", "qwen3-moe", "gpt-oss")
OTHERS = ("glm", "ministral3", "phi3", "gpt2", "olmo2", "cohere2", "llama-80")
Change = Callable[[Any], None]


@pytest.fixture(params=LEVELS)
def chosen(request: pytest.FixtureRequest) -> library.KernelChoice:
    """Each level; the fastest that there is instead of one that this processor does not run."""
    return built().get(request.param, next(iter(built().values())))


@pytest.fixture
def fastest() -> library.KernelChoice:
    return next(iter(built().values()))


def packed(
    kind: str,
    kernels: library.KernelChoice,
    *,
    weights: Weights = "native",
    kv: Any = None,
    change: Change | None = None,
    **changes: Any,
) -> LoadedModel:
    """A tiny bf16 model with packed linear layers; `change` is done to it before they are packed."""
    model = tiny_model(kind, BF16, **changes)
    randomise_norms(model)
    in_memory(model)
    if change is not None:
        change(model)
    with observed_linears(model) as called:
        probe(model)
    compute = KernelCompute(kernels.library)
    Linears(model, called, compute.packer("cpu")).pack(WeightsChoice(weights, "forced"))
    return replace(in_memory(model, kv=kv), compute=compute)


def fuse(loaded: LoadedModel) -> int:
    return loaded.compute.fuse(loaded)


def layers_of(loaded: LoadedModel) -> Any:
    return loaded.model.model.layers


def fused_layers(loaded: LoadedModel) -> int:
    return sum(isinstance(module.__dict__.get("forward"), FusedLayer) for module in loaded.model.modules())


def paths(loaded: LoadedModel) -> Iterator[torch.Tensor]:
    """Logits of a chunk over several blocks, of more rows on top, and of two sequences together."""
    bench, ids = Bench(loaded), random_ids(90)
    yield from bench.forward(("a", ids[:53]))
    yield from bench.forward(("b", ids[40:47]), ("a", ids[53:54]))
    yield from bench.forward(("a", ids[54:]), ("b", ids[:1]), ("c", ids[3:20]))


def error(ours: LoadedModel, theirs: LoadedModel) -> float:
    """The mean relative error of all rows of `paths`."""
    pairs = zip(paths(ours), paths(theirs), strict=True)
    return float(torch.cat([row_errors(one, other) for one, other in pairs]).mean())


@pytest.mark.parametrize("kind", FITTING)
@pytest.mark.parametrize("kv", ["bf16", "q4h"])
def test_layers_give_the_outputs_of_their_own_code(kind: str, kv: str, chosen: library.KernelChoice) -> None:
    own, fused = (packed(kind, chosen, kv=kv) for _ in range(2))
    assert fuse(fused) == len(layers_of(fused)) == fused_layers(fused) == 3
    own_error = error(own, packed(kind, library.KernelChoice(None), kv=kv))
    assert error(fused, own) < 0.5 * own_error  # what our products and attention differ from torch's by


def not_needed(*args: Any) -> Any:
    raise AssertionError("a layer's own code was called")


@pytest.mark.parametrize("weights", ["native", "int8", "int4"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_give_the_outputs_of_their_own_code(kind: str, weights: Weights, chosen: library.KernelChoice) -> None:
    own, fused = (packed(kind, chosen, weights=weights, kv="q4h") for _ in range(2))
    assert fuse(fused) == len(layers_of(fused)) == fused_layers(fused) == 3
    for layer in layers_of(fused):  # whose own code is not needed in a step over blocks
        layer.mlp.forward = not_needed
    pairs = zip(paths(fused), paths(own), strict=True)
    # The median: a rounding sends single rows to another expert.
    assert float(torch.cat([row_errors(one, other) for one, other in pairs]).median()) < 0.04


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_that_do_something_else_are_left_alone(kind: str, fastest: library.KernelChoice) -> None:
    loaded = packed(kind, fastest, change=scaled)
    assert fuse(loaded) == fused_layers(loaded) == 0


@pytest.mark.parametrize("weights", ["native", "int8", "int4"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", *MIXTURES])
def test_every_path_gives_the_same_bits_without_dummies(
    kind: str, weights: Weights, chosen: library.KernelChoice
) -> None:
    loaded = replace(packed(kind, chosen, weights=weights, kv="q4h"), row_multiple=1)
    assert fuse(loaded) == 3
    assert self_test(loaded).promise == "bitwise"
    padded = replace(loaded, row_multiple=4)
    assert all(torch.equal(*each) for each in zip(paths(loaded), paths(padded), strict=True))


def test_dummies_attend_to_nothing(fastest: library.KernelChoice) -> None:
    loaded, seen = packed("llama", fastest), list[torch.Tensor]()
    loaded.model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0][0].clone()))
    for fused in (False, True):
        assert not fused or fuse(loaded) == 3
        bench = Bench(loaded)
        bench.forward(("b", random_ids(64)))  # memory holds rows of another step
        bench.forward(("a", random_ids(61)))
    own, ours = seen[1], seen[-1]
    assert own.shape == ours.shape == (64, 64)
    torch.testing.assert_close(ours[61:], own[61:], rtol=0.02, atol=0.02 * float(own.float().std()))
    assert torch.equal(ours[61], ours[62]) and torch.equal(ours[61], ours[63])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads: int, fastest: library.KernelChoice) -> None:
    loaded = packed("qwen3", fastest, kv="q4h", hidden_size=512, intermediate_size=1024)
    assert fuse(loaded) == 3
    alone = list(paths(loaded))
    torch.set_num_threads(threads)
    try:
        together = list(paths(loaded))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(*each) for each in zip(together, alone, strict=True))


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_of_another_form_are_left_alone(kind: str, fastest: library.KernelChoice) -> None:
    loaded = packed(kind, fastest)
    assert fuse(loaded) == fused_layers(loaded) == 0


def test_layers_without_positions_are_left_alone(fastest: library.KernelChoice) -> None:
    loaded = packed("smollm3", fastest, hidden_size=128, num_hidden_layers=4)  # its fourth layer has none
    assert fuse(loaded) == 3
    assert not isinstance(layers_of(loaded)[3].forward, FusedLayer)


def scaled(model: Any) -> None:
    """What a layer adds is halved, in a way that its structure does not show."""
    for layer in model.model.layers:
        layer.__class__ = type("Scaled", (type(layer),), {"forward": scaled_forward})


def scaled_forward(self: Any, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
    output = super(type(self), self).forward(hidden_states, **keywords)
    return hidden_states + 0.5 * (output - hidden_states)


def other_epsilon(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.forward = lambda x: nn.functional.rms_norm(x, x.shape[-1:], None, 1.0)


def small_updates(model: Any) -> None:
    """What a layer adds is a hundredth of its rows, half of it lost."""
    model.model.embed_tokens.weight.data *= 3000
    scaled(model)


def gelu(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()


def hooked(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: output)


def patched(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.forward = layer.self_attn.forward


def with_more(model: Any) -> None:
    for layer in model.model.layers:
        layer.adapter = nn.Identity()


@pytest.mark.parametrize("change", [scaled, small_updates, other_epsilon, gelu, hooked, patched, with_more])
def test_layers_that_do_something_else_are_left_alone(change: Change, fastest: library.KernelChoice) -> None:
    loaded = packed("llama", fastest, change=change)
    assert fuse(loaded) == fused_layers(loaded) == 0
    assert error(loaded, packed("llama", library.KernelChoice(None), change=change)) < 0.1


def test_norms_and_gates_of_other_kinds_are_computed_too(fastest: library.KernelChoice) -> None:
    def change(model: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.GELU(approximate="tanh")
            norm = layer.post_attention_layernorm
            norm.__class__ = type("Shifted", (type(norm),), {"forward": shifted_forward})

    own, fused = (packed("llama", fastest, change=change) for _ in range(2))
    assert fuse(fused) == 3
    assert error(fused, own) < 0.02


def shifted_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A norm that multiplies by 1 + weight before it rounds, as Gemma's does."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return (wide * (1 + self.weight.float())).to(x.dtype)


def test_one_layer_that_differs_does_not_keep_the_others_from_it(fastest: library.KernelChoice) -> None:
    def change(model: Any) -> None:
        model.model.layers[1].mlp.act_fn = nn.GELU()

    loaded = packed("llama", fastest, change=change)
    assert fuse(loaded) == 2
    assert not isinstance(layers_of(loaded)[1].forward, FusedLayer)
    assert error(loaded, packed("llama", fastest, change=change)) < 0.05


def test_a_layer_without_kernels_or_in_fp32_is_left_alone() -> None:
    assert fuse(in_memory(tiny_model("llama", BF16))) == 0
    assert fuse(in_memory(tiny_model("llama", torch.float32))) == 0


def test_the_layers_own_code_computes_what_is_no_step_over_blocks(fastest: library.KernelChoice) -> None:
    loaded = packed("llama", fastest)
    ids = torch.tensor([random_ids(20)])
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        before = loaded.model(input_ids=ids, use_cache=False).logits
    loaded.model.set_attn_implementation("rekindle")
    assert fuse(loaded) == 3
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        assert torch.equal(loaded.model(input_ids=ids, use_cache=False).logits, before)
    loaded.model.set_attn_implementation("rekindle")
    trial_forward(loaded, BF16)


def test_numbers_that_are_not_finite_fail_their_own_sequence_only(fastest: library.KernelChoice) -> None:
    loaded = packed("llama", fastest, kv="q4h")
    assert fuse(loaded) == 3
    clean = Bench(loaded).forward(("b", random_ids(9)))[0]
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[7] = torch.nan
    bench = Bench(loaded)
    logits = bench.forward(("a", [*random_ids(9), 7]), ("b", random_ids(9)))
    assert bench.failed == {0}
    assert torch.equal(logits[1], clean)


def test_a_model_whose_layers_are_all_fused_is_loaded_without_dummies(model_dir: Callable[..., Path]) -> None:
    def load(kind: str, **changes: Any) -> LoadedModel:
        settings = ModelSettings(model=str(model_dir(kind, "bf16")), **changes)
        return load_model(settings, block_tokens=16, max_context=None, format_map_dir=None)

    fused, other, by_torch = load("llama"), load("olmo2"), load("llama", kernels="torch")
    assert (fused.row_multiple, other.row_multiple, by_torch.row_multiple) == (1, 4, 4)
    for kind in ("qwen3-moe", "gemma"):  # experts; a head that is tied to a scaled embedding
        loaded = load(kind)
        assert (loaded.row_multiple, loaded.promise) == (1, "bitwise")
    assert fused.promise == "bitwise" and fused_layers(fused) == 3 and fused_layers(by_torch) == 0


def test_dummies_stay_where_torch_computes_the_head(
    model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where an embedding has the same weights and does something else with them."""
    monkeypatch.setattr(
        GemmaTextScaledWordEmbedding, "forward", lambda self, ids: nn.functional.embedding(ids, self.weight) + 1
    )
    settings = ModelSettings(model=str(model_dir("gemma", "bf16")))
    loaded = load_model(settings, block_tokens=16, max_context=None, format_map_dir=None)
    assert type(loaded.model.lm_head) is nn.Linear and fused_layers(loaded) == 3
    assert loaded.row_multiple == 4 and loaded.promise == "bitwise"
