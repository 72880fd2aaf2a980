"""Packed linear layers: near torch's, the same bits in any company, and everything that does not fit left alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from rekindle.compute.cpu.experts import pack_experts
from rekindle.compute.cpu.packed import (
    agrees,
    observed_linears,
    pack_linears,
    release_files,
)
from rekindle.compute.cpu.packed_modules import PackedEmbedding, PackedLinear
from rekindle.compute.cpu.packer import KernelPacker
from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.layer_forms import WeightFormat
from rekindle.model.geometry import probe
from rekindle.model.loaded import BY_TORCH
from rekindle.model.padded_experts import padded_experts
from rekindle.model.selftest import self_test
from rekindle.model.trial import row_errors, trial_forward
from tests.kernels.native import built, needs_kernels, runnable
from tests.model.helpers import Bench, in_memory, random_ids, reference_logits
from tests.tiny_models import tiny_model

pytestmark = needs_kernels
BF16 = torch.bfloat16
MIXTURES = ("mixtral", "qwen3-moe", "gpt-oss")
KINDS = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma4",
    "phi3",
    "gpt-neox",
    "gpt2",
    "olmo2",
    "cohere2",
    *MIXTURES,
)


@pytest.fixture(scope="module")
def packer() -> KernelPacker:
    found = built()[runnable()[0]].library
    assert found is not None
    return KernelPacker.of(found)


def pack(model: Any, packer: KernelPacker, run: Callable[[], Any]) -> list[str]:
    with observed_linears(model) as called, torch.inference_mode():
        run()
    notes = [*pack_linears(model, packer, called), *pack_experts(model, packer)]
    assert not called
    release_files(model)
    return notes


def count(model: nn.Module, *types: type[nn.Module]) -> int:
    return sum(type(module) in types for module in model.modules())


def packed_model(kind: str, packer: KernelPacker, **changes: Any) -> Any:
    """A tiny bf16 model whose linear layers are packed."""
    model = tiny_model(kind, BF16, **changes)
    in_memory(model)
    assert pack(model, packer, lambda: probe(model)) == []
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_near_those_of_torch(packer: KernelPacker, kind: str) -> None:
    ids = random_ids(50)
    model = tiny_model(kind, BF16)
    in_memory(model)
    theirs, linears = reference_logits(model, ids), count(model, nn.Linear, Conv1D)
    true = reference_logits(tiny_model(kind, torch.float32), ids)
    packed = packed_model(kind, packer)
    assert count(packed, PackedLinear) == linears and count(packed, nn.Linear, Conv1D) == 0
    ours = reference_logits(packed, ids)
    errors = torch.stack([row_errors(ours, true), row_errors(theirs, true)])
    mine, other = (errors.median(dim=1).values if kind in MIXTURES else errors.square().mean(dim=1).sqrt()).tolist()
    assert mine <= 1.25 * other  # rounded as often as torch's, and once where torch rounds before the bias
    if kind not in MIXTURES:
        p, q = theirs.float().log_softmax(-1), ours.float().log_softmax(-1)
        assert float((p.exp() * (p - q)).sum(-1).mean()) < 0.02


def test_a_model_is_served_with_the_same_bits_on_every_path(packer: KernelPacker) -> None:
    model = packed_model("llama", packer)
    loaded = in_memory(model, kv="q4h")
    trial_forward(in_memory(model), BF16)
    assert self_test(loaded).promise == "bitwise"
    bench, ids = Bench(loaded), random_ids(41)
    together = bench.forward(("a", ids), ("b", ids[:7]))
    alone = bench.forward(("c", ids[:7]))
    assert torch.equal(together[1], alone[0])


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_packed_one_by_one_and_freed(packer: KernelPacker, kind: str) -> None:
    model = tiny_model(kind, BF16)
    in_memory(model)

    def layers() -> list[Any]:
        return [module for module in model.modules() if hasattr(module, "has_post_expert_norm")]

    rows = torch.randn(9, 64).to(BF16)
    chosen, weights = torch.randint(4, (9, 2)), torch.rand(9, 2).to(BF16)
    with torch.inference_mode():
        expected = [padded_experts(layer, rows, chosen, weights) for layer in layers()]
    held = [weakref.ref(layer.down_proj) for layer in layers()]
    numbers = [parameter.numel() for parameter in model.parameters()]
    assert pack_experts(model, packer) == []
    gc.collect()
    assert len(held) == 3 and not any(ref() is not None for ref in held)
    assert [parameter.numel() for parameter in model.parameters()] == numbers
    for layer, theirs in zip(layers(), expected, strict=True):
        assert layer.gate_up_proj.isnan().all() and layer.down_proj.isnan().all()
        with torch.inference_mode():
            ours = padded_experts(layer, rows, chosen, weights)
            alone = torch.cat(
                [
                    padded_experts(layer, *each)
                    for each in zip(*(x.split(1) for x in (rows, chosen, weights)), strict=True)
                ]
            )
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=float(0.02 * theirs.float().std()))
        assert torch.equal(ours, alone)


def test_a_row_does_not_depend_on_company_or_strides(packer: KernelPacker) -> None:
    model = nn.Sequential(nn.Linear(96, 130, dtype=BF16))
    rows = torch.randn(3, 40, 96).to(BF16)
    pack(model, packer, lambda: model(rows))
    whole = model(rows)
    assert whole.shape == (3, 40, 130)
    assert torch.equal(model(rows[1, 7]), whole[1, 7])
    assert torch.equal(model(rows[:, ::3]), whole[:, ::3])
    wide = torch.randn(5, 200).to(BF16)
    assert torch.equal(model(wide[:, 1:97]), model(wide[:, 1:97].clone()))
    assert torch.equal(model(wide.T[:96].T), model(wide[:, :96].clone()))
    assert model(rows[:, :0]).shape == (3, 0, 130)
    for wrong in (rows.float(), rows[..., :95]):
        with pytest.raises(RuntimeError, match="rows of 96 bf16 values are needed"):
            model(wrong)


def test_shape_dtype_and_device_of_the_weight_stay_and_its_values_do_not(packer: KernelPacker) -> None:
    linear, conv = nn.Linear(96, 130, dtype=BF16), Conv1D(130, 96).to(BF16)
    model, rows = nn.ModuleList([linear, conv]), torch.randn(4, 96).to(BF16)
    numbers = [parameter.numel() for parameter in model.parameters()]
    expected = [linear(rows), conv(rows)]
    pack(model, packer, lambda: [module(rows) for module in model])
    for module, old, theirs in zip(model, (linear, conv), expected, strict=True):
        assert isinstance(module, PackedLinear) and agrees(old, module)
        assert (module.weight.shape, module.weight.dtype, module.weight.device) == (
            *(old.weight.shape, BF16),
            old.weight.device,
        )
        assert module.weight.isnan().all() and module.weight.untyped_storage().nbytes() == 2
        assert module.bias is old.bias and module.training == old.training
        torch.testing.assert_close(module(rows), theirs, rtol=2**-7, atol=2**-7)
    assert [parameter.numel() for parameter in model.parameters()] == numbers


def test_originals_are_freed(packer: KernelPacker) -> None:
    model = nn.Sequential(nn.Linear(64, 64, dtype=BF16), nn.Linear(64, 64, dtype=BF16))
    held = [weakref.ref(module) for module in model] + [weakref.ref(module.weight) for module in model]
    pack(model, packer, lambda: model(torch.zeros(1, 64, dtype=BF16)))
    gc.collect()
    assert [ref() for ref in held] == [None] * 4
    assert sum(module.packed.num_bytes for module in model) == 2 * 64 * 64 * 2  # type: ignore[union-attr]


def test_the_file_of_weights_is_unmapped(packer: KernelPacker, model_dir: Callable[..., Path]) -> None:
    directory = model_dir("llama", "bf16")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=BF16)
    in_memory(model)
    expected = reference_logits(model, random_ids(20))

    def is_mapped() -> bool:
        return str(directory) in Path("/proc/self/maps").read_text()

    assert is_mapped()
    pack(model, packer, lambda: probe(model))
    gc.collect()
    assert not is_mapped()
    assert float(row_errors(reference_logits(model, random_ids(20)), expected).mean()) < 0.1


def test_a_tied_head_shares_its_memory_with_the_embedding(packer: KernelPacker) -> None:
    ids = random_ids(50)
    expected = tiny_model("llama", BF16, tie_word_embeddings=True)
    model = packed_model("llama", packer, tie_word_embeddings=True)
    embedding, head = model.get_input_embeddings(), model.lm_head
    assert isinstance(embedding, PackedEmbedding) and isinstance(head, PackedLinear)
    assert embedding.packed is head.packed
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in expected.parameters())
    every = torch.arange(384).view(3, 128)
    assert torch.equal(embedding(every), expected.get_input_embeddings()(every))
    assert embedding(every[:0]).shape == (0, 128, 64)
    for wrong in (384, -1):
        with pytest.raises(IndexError, match="between 0 and 383"):
            embedding(torch.tensor([3, wrong]))
    in_memory(expected)
    assert float(row_errors(reference_logits(model, ids), reference_logits(expected, ids)).mean()) < 0.1


@pytest.mark.parametrize("kind", ["gemma3", "gemma", "minicpm3"])
def test_a_scaled_embedding_shares_its_head_s_memory_too(packer: KernelPacker, kind: str) -> None:
    model, own = (tiny_model(kind, BF16, tie_word_embeddings=True) for _ in range(2))
    embedding, head = model.get_input_embeddings(), model.lm_head
    pack(model, packer, lambda: head(torch.zeros(1, 64, dtype=BF16)))
    new = model.get_input_embeddings()
    assert isinstance(new, PackedEmbedding) and new.packed is model.lm_head.packed
    every = torch.arange(384)
    assert torch.equal(new(every), own.get_input_embeddings()(every))
    assert not torch.equal(new(every), embedding.weight)


class Shifted(nn.Embedding):
    """Does with its rows what no number that it has explains."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + 1


@pytest.mark.parametrize("weight_format", ["bf16", "int8"])
def test_a_head_whose_embedding_does_something_else(packer: KernelPacker, weight_format: WeightFormat) -> None:
    """In bf16 it is left to torch, as the weights would be in memory twice; in int8 an embedding keeps its own."""
    head, embedding = linear(), Shifted(64, 64, dtype=BF16)
    embedding.weight = head.weight
    model = nn.ModuleDict({"head": head, "embedding": embedding})
    rows = torch.zeros(1, 64, dtype=BF16)
    with observed_linears(model) as called:
        head(rows)
    notes = pack_linears(model, packer, called, weight_format)
    assert model["embedding"] is embedding
    if weight_format == "int8":
        assert notes == [] and isinstance(model["head"], PackedLinear)
    else:
        assert notes == ["embedding is left to torch: our kernel gives other outputs"] and model["head"] is head


class Scaled(nn.Linear):
    """A subclass may do anything."""


class Reader(nn.Module):
    """Uses a linear layer's weights itself."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.matrix = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix


class Keywords(nn.Module):
    """Calls its layer by a keyword too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.inner(input=x)


def linear(dtype: torch.dtype = BF16) -> nn.Linear:
    return nn.Linear(64, 64, dtype=dtype)


def hooked() -> nn.Module:
    module = linear()
    module.register_forward_hook(lambda module, args, output: output)
    return module


def patched() -> nn.Module:
    module = linear()
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


def parametrised() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(linear())


def shared() -> nn.Module:
    module = linear()
    return nn.Sequential(module, Reader(module.weight))


@pytest.mark.parametrize(
    "make",
    [
        lambda: linear(torch.float32),
        lambda: Scaled(64, 64, dtype=BF16),
        hooked,
        patched,
        parametrised,
        shared,
        Keywords,
    ],
)
def test_what_does_not_fit_is_left_alone(packer: KernelPacker, make: Callable[[], nn.Module]) -> None:
    odd, fits = make(), linear()
    model = nn.ModuleList([odd, fits])
    dtype = next(odd.parameters()).dtype

    def run() -> None:
        fits(torch.zeros(1, 64, dtype=BF16))
        for module in odd if isinstance(odd, nn.ModuleList) else [odd]:
            module(torch.zeros(1, 64, dtype=torch.int64 if isinstance(module, nn.Embedding) else dtype))

    before = list(odd.modules())
    assert pack(model, packer, run) == []
    assert list(odd.modules()) == before and model[0] is odd
    assert isinstance(model[1], PackedLinear)


def test_a_layer_that_is_not_called_is_left_alone(packer: KernelPacker) -> None:
    model = nn.ModuleList([linear(), linear()])
    pack(model, packer, lambda: model[1](torch.zeros(1, 64, dtype=BF16)))
    assert [type(module) for module in model] == [nn.Linear, PackedLinear]


def test_a_layer_in_two_places_is_replaced_in_both(packer: KernelPacker) -> None:
    module = linear()
    model = nn.ModuleDict({"a": module, "b": nn.Sequential(module), "c": module})
    pack(model, packer, lambda: module(torch.zeros(1, 64, dtype=BF16)))
    assert isinstance(model["a"], PackedLinear) and model["a"] is model["b"][0] is model["c"]  # type: ignore[index]


@pytest.fixture
def doubled() -> Iterator[None]:
    """Everything that nn.Linear returns is doubled, without a trace in its modules."""

    def double(module: nn.Module, args: Any, output: torch.Tensor) -> Any:
        return 2 * output if type(module) is nn.Linear else output

    handle = register_module_forward_hook(double)
    yield
    handle.remove()


@pytest.mark.usefixtures("doubled")
def test_a_layer_that_computes_something_else_is_left_with_a_note(packer: KernelPacker) -> None:
    model = nn.Sequential(nn.Sequential(linear()))
    (note,) = pack(model, packer, lambda: model(torch.zeros(1, 64, dtype=BF16)))
    assert note == "0.0 is left to torch: our kernel gives other outputs"
    assert count(model, nn.Linear) == 1


def test_one_wrong_weight_is_seen(packer: KernelPacker) -> None:
    right, wrong = (nn.Linear(4096, 128, dtype=BF16) for _ in range(2))
    wrong.load_state_dict(right.state_dict())
    with torch.no_grad():
        wrong.weight[77, 3001] += 2 * 4096**-0.5  # twice the largest
    model = nn.Sequential(right)
    pack(model, packer, lambda: model(torch.zeros(1, 4096, dtype=BF16)))
    packed = model[0]
    assert isinstance(packed, PackedLinear) and agrees(right, packed) and not agrees(wrong, packed)


def test_weights_that_are_not_finite_are_packed_as_they_are(packer: KernelPacker) -> None:
    module = linear()
    with torch.no_grad():
        module.weight[3, 5] = torch.nan
        module.weight[4, 5] = torch.inf
    model = nn.Sequential(module)
    assert pack(model, packer, lambda: model(torch.zeros(1, 64, dtype=BF16))) == []
    assert isinstance(model[0], PackedLinear)
    assert model(torch.ones(1, 64, dtype=BF16)).isnan()[0].nonzero()[:, 0].tolist() == [3]


def generated(loaded: Any) -> list[int]:
    bench, ids, out = Bench(loaded), random_ids(20), list[int]()
    for _ in range(12):
        (logits,) = bench.forward(("a", ids))
        ids = [int(logits[-1].argmax())]
        out += ids
    return out


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_bundled_model_generates_with_the_kernels_that_are_set(kernels: Any) -> None:
    def model(chosen: Any) -> Any:
        settings = ModelSettings(kernels=chosen)
        return load_model(settings, block_tokens=64, max_context=None, format_map_dir=None)

    loaded = model(kernels)
    assert (count(loaded.model, PackedLinear) > 0) == (loaded.compute.level != BY_TORCH)
    assert (count(loaded.model, nn.Linear) == 0) == (loaded.compute.level != BY_TORCH)
    ids = random_ids(60)
    (ours,), (theirs,) = Bench(loaded).forward(("a", ids)), Bench(model("torch")).forward(("a", ids))
    p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
    assert float((p.exp() * (p - q)).sum(-1).mean()) < 0.01
    assert generated(loaded) == generated(loaded) and len(set(generated(loaded))) > 3
