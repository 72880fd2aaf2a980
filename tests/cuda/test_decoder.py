"""Decoder layers on a card: what transformers' own code gives, as many as must be fused, and only where they fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rekindle.compute.cpu.packed import replace as replace_linears
from rekindle.compute.cpu.packed_modules import PackedLinear
from rekindle.kv.reference import relative_error
from rekindle.model.fused_layers import FusedLayer, fuse_modules
from rekindle.model.kept_tensors import placeholder
from rekindle.model.loaded import LoadedModel
from rekindle_cuda.compute import TritonCompute
from rekindle_cuda.decoder import CardKernels
from rekindle_cuda.linears import Products
from rekindle_cuda.packer import CardPacker
from rekindle_cuda.packing import RoundFormat, pack
from tests.cuda.conftest import IS_INTERPRETED
from tests.cuda.test_attention import DEVICE
from tests.model.helpers import Bench, in_memory, random_ids, randomise_norms
from tests.tiny_models import tiny_model

FP32 = torch.float32
# Two kinds of layers, with few heads: the interpreter runs a program for every row and head, one after the other.
TWO_KINDS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
TWO_KINDS |= {"num_attention_heads": 2, "num_key_value_heads": 1}
# Kind -> what its layers have that no other's do; all layers of each are fused, one where all are alike.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases
    "qwen3": {},  # norms of heads
    "gemma2": TWO_KINDS,  # four norms, a soft cap
    "gemma3": TWO_KINDS,
    "gpt-oss": TWO_KINDS,  # sinks, a mixture; halves share positions
    "glm": {},  # pairs of neighbours are rotated, in half of a head; an MLP of two products
    "glm4-moe": {"num_hidden_layers": 2, "first_k_dense_replace": 1},  # halves of half a head; a mixture, an MLP
}
# Kind -> norms and MLPs that are fused by themselves: its layer is not.
OTHERS = {"ministral3": 3 + 1, "phi3": 3 + 1, "olmo2": 5 + 1}


@pytest.fixture(autouse=IS_INTERPRETED)
def few_rows_are_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a second for a layer of twenty."""
    monkeypatch.setattr("rekindle.model.observation.LENGTHS", (3, 2))


def model_of(kind: str, dtype: torch.dtype = FP32, **changes: Any) -> Any:
    model = tiny_model(kind, dtype, **{"num_hidden_layers": 1} | KINDS.get(kind, {}) | changes).to(DEVICE)
    randomise_norms(model)
    return model


def on_card(model: Any, kv: Any = None) -> LoadedModel:
    loaded = in_memory(model, kv=kv)
    return replace(loaded, compute=TritonCompute("triton", "a card or the interpreter"), device=DEVICE.type)


def in_torch(model: Any) -> LoadedModel:
    """Where its products are and what is not fused, with attention by torch."""
    return replace(in_memory(model), device=DEVICE.type)


def fused_of(loaded: LoadedModel) -> tuple[int, int]:
    """How many layers are fused, and how many other modules."""
    forwards = [each.__dict__["forward"] for each in loaded.model.modules() if "forward" in each.__dict__]
    layers = sum(isinstance(each, FusedLayer) for each in forwards)
    return layers, len(forwards) - layers


def paths(loaded: LoadedModel) -> Iterator[torch.Tensor]:
    """Logits of a prompt, of more rows on top, of another sequence with them, and of one row."""
    bench, ids = Bench(loaded), random_ids(24)
    yield from bench.forward(("a", ids[:7]))
    yield from bench.forward(("a", ids[7:10]), ("b", ids[20:]))
    yield from bench.forward(("a", ids[10:11]))


def agree(ours: LoadedModel, theirs: LoadedModel, bound: float) -> None:
    for got, wanted in zip(paths(ours), paths(theirs), strict=True):
        assert relative_error(got, wanted) < bound


@pytest.mark.parametrize("kind", KINDS)
def test_layers_give_what_their_own_code_gives(kind: str) -> None:
    theirs, ours = in_torch(model_of(kind)), on_card(model_of(kind))
    num_layers = ours.model.config.num_hidden_layers
    assert num_layers == KINDS[kind].get("num_hidden_layers", 1)
    assert ours.compute.fuse(ours) == fused_of(ours)[0] == num_layers
    agree(ours, theirs, 1e-5)


def packed_model(kind: str, weight_format: RoundFormat) -> Any:
    """One layer, with all products but the head's in 8 or 4 bits."""
    model = model_of(kind, num_hidden_layers=1, layer_types=["full_attention"])
    linears = [each for each in model.model.modules() if type(each) is nn.Linear]
    replace_linears(model, CardPacker(DEVICE), {each: pack(each.weight.detach(), weight_format) for each in linears})
    return model


@pytest.mark.parametrize(("kind", "weight_format"), [("qwen2", "int8"), ("gemma3", "int4")])
def test_layers_over_packed_weights_give_what_their_own_code_gives(kind: str, weight_format: RoundFormat) -> None:
    """But for roundings to 8 bits that the last bits of a norm or a gate move."""
    theirs, ours = in_torch(packed_model(kind, weight_format)), on_card(packed_model(kind, weight_format))
    assert ours.compute.fuse(ours) == 1
    agree(ours, theirs, 0.05)


@pytest.mark.parametrize("formats", [("int8",) * 3, ("int4",) * 3, ("int8", "int4", "int8")], ids="-".join)
def test_products_of_packed_weights_with_the_same_rows_have_their_bits(formats: tuple[RoundFormat, ...]) -> None:
    """Weights of one format lie together; others multiply the rows that were rounded once."""
    packer, modules = CardPacker(DEVICE), []
    for columns, fmt in zip((64, 40, 8), formats, strict=True):
        linear = nn.Linear(96, columns, device=DEVICE)
        packed = packer.pack(linear.weight, "columns first", fmt)
        modules.append(PackedLinear(packed, placeholder(linear.weight), linear, packer))
    rows = torch.randn(5, 96, device=DEVICE)
    with torch.inference_mode():
        wanted = [module(rows) for module in modules]
        products = Products.of(*modules)
        for count in (5, 1, 0):
            for got, module, each in zip(products(rows[:count]), modules, wanted, strict=True):
                assert torch.equal(got, each[:count]) and torch.equal(module(rows[:count]), each[:count])
    stored = {module.packed.held.numbers.untyped_storage().data_ptr() for module in modules}
    assert len(stored) == (1 if len(set(formats)) == 1 else 3)
    for module in modules:
        module.packed.check()


def halved(model: Any) -> None:
    """What a layer adds is halved, in a way that its structure does not show."""
    for layer in model.model.layers:
        layer.__class__ = type("Halved", (type(layer),), {"forward": halved_forward})


def halved_forward(self: Any, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
    output = super(type(self), self).forward(hidden_states, **keywords)
    return hidden_states + 0.5 * (output - hidden_states)


def hooked(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: output)


@pytest.mark.parametrize("change", [halved, hooked])
def test_layers_that_do_something_else_are_left_alone(change: Callable[[Any], None]) -> None:
    model = model_of("llama")
    change(model)
    ours = on_card(model)
    assert ours.compute.fuse(ours) == 0
    assert fused_of(ours) == (0, 3 + 1)


@pytest.mark.parametrize("kind", OTHERS)
def test_norms_and_mlps_of_other_layers_are_fused_by_themselves(kind: str) -> None:
    theirs, ours = in_torch(model_of(kind)), on_card(model_of(kind))
    assert ours.compute.fuse(ours) == 0
    assert fused_of(ours) == (0, OTHERS[kind])
    agree(ours, theirs, 1e-5)


class Doubling(nn.Module):
    """An MLP, or twice one for rows of its own length: not what its parts give over small weights."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(40, 72, device=DEVICE) for _ in range(2))
        self.down_proj, self.factor = nn.Linear(72, 40, device=DEVICE), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return (self.factor if x.shape[-1] == 40 else 1) * output


def test_an_mlp_is_compared_over_its_own_weights_too() -> None:
    mlps = nn.ModuleList([Doubling(1), Doubling(2), Doubling(1.02)])
    fuse_modules(mlps, CardKernels(FP32, DEVICE))
    assert ["forward" in each.__dict__ for each in mlps] == [True, False, False]
    rows = torch.randn(2, 3, 40, device=DEVICE)
    with torch.inference_mode():
        torch.testing.assert_close(mlps[0](rows), Doubling.forward(mlps[0], rows))
        assert mlps[0](rows[0, 0]).shape == (40,) and mlps[0](rows[:0]).shape == (0, 3, 40)


def test_weights_that_lie_together_take_no_more_memory_and_serve_their_modules_too() -> None:
    def size(model: Any) -> int:
        return sum(
            {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()}.values()
        )

    model = model_of("qwen2")
    rows, before = torch.randn(3, 128, device=DEVICE), size(model)
    (layer,) = model.model.layers
    with torch.inference_mode():
        own = [module(rows) for module in (layer.self_attn.k_proj, layer.mlp)]
    ours = on_card(model)
    assert ours.compute.fuse(ours) == 1
    assert size(model) == before
    assert len({each.weight.untyped_storage().data_ptr() for each in (layer.mlp.gate_proj, layer.mlp.up_proj)}) == 1
    with torch.inference_mode():
        for module, wanted in zip((layer.self_attn.k_proj, layer.mlp), own, strict=True):
            torch.testing.assert_close(module(rows), wanted)


def test_a_model_whose_numbers_are_not_the_kernels_is_left_alone() -> None:
    ours = on_card(model_of("llama", torch.float64))
    assert ours.compute.fuse(ours) == 0
    assert fused_of(ours) == (0, 0)
