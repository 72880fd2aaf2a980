"""Fused modules: the bits of their own code but for a few roundings, the same in any company, the rest left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from rekindle.compute.cpu.decoder import DecoderKernels
from rekindle.compute.cpu.kernels import library
from rekindle.compute.cpu.kernels.decoder import DecoderKernel
from rekindle.compute.cpu.kernels.levels import LEVELS
from rekindle.compute.cpu.packed import observed_linears, pack_linears
from rekindle.compute.cpu.packed_modules import PackedLinear
from rekindle.compute.cpu.packer import KernelPacker
from rekindle.layer_forms import WeightFormat
from rekindle.model.fused_layers import fuse_modules
from rekindle.model.geometry import probe
from rekindle.model.selftest import self_test
from rekindle.model.trial import row_errors, trial_forward
from tests.kernels.native import built, needs_kernels
from tests.model.helpers import Bench, in_memory, random_ids, randomise_norms, reference_logits
from tests.tiny_models import tiny_model

pytestmark = needs_kernels
BF16 = torch.bfloat16
WEIGHTS: tuple[WeightFormat, ...] = ("bf16", "int8", "int4")
# Kind -> what is fused of it.
KINDS = {
    "llama": {"LlamaMLP": 3, "LlamaRMSNorm": 7},
    "qwen3": {"Qwen3MLP": 3, "Qwen3RMSNorm": 13},
    "gemma2": {"Gemma2MLP": 3, "Gemma2RMSNorm": 13},
    "gemma3": {"Gemma3MLP": 3, "Gemma3RMSNorm": 19},
    "phi3": {"Phi3MLP": 3, "Phi3RMSNorm": 7},
    "olmo2": {"Olmo2MLP": 3, "Olmo2RMSNorm": 13},
    "cohere2": {"Cohere2MLP": 3},
    "mixtral": {"MixtralRMSNorm": 7},
    "gpt-neox": {},
}


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> library.KernelLibrary:
    """Each level; the fastest that there is instead of one that this processor does not run."""
    found = built().get(request.param, next(iter(built().values()))).library
    assert found is not None
    return found


def pack(model: Any, kernels: library.KernelLibrary, run: Callable[[], Any], weights: WeightFormat = "bf16") -> None:
    with observed_linears(model) as called, torch.inference_mode():
        run()
    assert pack_linears(model, KernelPacker.of(kernels), called, weights) == []


def fused_counts(model: nn.Module) -> dict[str, int]:
    names = [type(module).__name__ for module in model.modules() if "forward" in module.__dict__]
    return {name: names.count(name) for name in sorted(set(names))}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_fused_of_each_architecture_gives_its_logits(kernels: library.KernelLibrary, kind: str) -> None:
    model = tiny_model(kind, BF16)
    randomise_norms(model)
    in_memory(model)
    pack(model, kernels, lambda: probe(model))
    ids = random_ids(50)
    theirs = reference_logits(model, ids)
    fuse_modules(model.modules(), DecoderKernels(DecoderKernel(kernels)))
    assert fused_counts(model) == KINDS[kind]
    assert float(row_errors(reference_logits(model, ids), theirs).median()) < 0.02
    trial_forward(in_memory(model), BF16)


def test_a_model_with_fused_modules_gives_the_same_bits_on_every_path(kernels: library.KernelLibrary) -> None:
    model = tiny_model("qwen3", BF16)
    in_memory(model)
    pack(model, kernels, lambda: probe(model))
    fuse_modules(model.modules(), DecoderKernels(DecoderKernel(kernels)))
    loaded, ids = in_memory(model, kv="q4h"), random_ids(41)
    assert self_test(loaded).promise == "bitwise"
    bench = Bench(loaded)
    together = bench.forward(("a", ids), ("b", ids[:7]))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        alone = bench.forward(("c", ids[:7]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together[1], alone[0])


class Norm(nn.Module):
    """RMSNorm as most models write it."""

    def __init__(self, columns: int = 72) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns).to(BF16), requires_grad=False)
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Centred(Norm):
    """As LayerNorm: the mean is subtracted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class Clamped(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-100, 100))


class Doubled(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Mlp(nn.Module):
    """A gated MLP as most models write it."""

    def __init__(self, activation: str = "silu", inner: int = 72) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(40, inner, dtype=BF16) for _ in range(2))
        self.down_proj = nn.Linear(inner, 40, dtype=BF16)
        self.act_fn = ACT2FN[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: output)
    return module


def with_a_hooked_projection() -> nn.Module:
    module = Mlp()
    hooked(module.down_proj)
    return module


@pytest.mark.parametrize("make", [Norm, Mlp, lambda: Mlp("gelu_pytorch_tanh")])
def test_a_module_that_is_fused_takes_rows_of_any_shape(
    kernels: library.KernelLibrary, make: Callable[[], nn.Module]
) -> None:
    model = nn.ModuleList([make()])
    columns = 72 if isinstance(model[0], Norm) else 40
    rows = 3 * torch.randn(2, 9, columns).to(BF16)
    pack(model, kernels, lambda: model[0](rows))
    theirs = model[0](rows)
    fuse_modules(model.modules(), DecoderKernels(DecoderKernel(kernels)))
    assert "forward" in model[0].__dict__
    ours = model[0](rows)
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)
    assert torch.equal(model[0](rows[1, 4]), ours[1, 4])
    wide = rows.transpose(0, 1)
    assert torch.equal(model[0](wide), ours.transpose(0, 1))
    assert model[0](rows[:, :0]).shape == (2, 0, columns)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_an_mlp_is_fused_whatever_its_weights_are(weights: WeightFormat, kernels: library.KernelLibrary) -> None:
    """In 8 and 4 bits a value beside a rounding's edge moves all outputs: in most of these layers there is one."""
    torch.manual_seed(0)
    model = nn.ModuleList([Mlp(inner=2048) for _ in range(8)])
    rows = 3 * torch.randn(9, 40).to(BF16)
    pack(model, kernels, lambda: [mlp(rows) for mlp in model], weights)
    theirs = [mlp(rows) for mlp in model]
    fuse_modules(model.modules(), DecoderKernels(DecoderKernel(kernels)))
    assert fused_counts(model) == {"Mlp": 8}
    for mlp, own in zip(model, theirs, strict=True):
        assert float((mlp(rows) - own).norm() / own.norm()) < 0.01


class Doubling(Mlp):
    """Twice an MLP, but of rows of another length just that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (2 if x.shape[-1] == 40 else 1) * super().forward(x)


def test_the_modules_own_weights_are_compared_in_8_bits_too(kernels: library.KernelLibrary) -> None:
    model = nn.ModuleList([Doubling()])
    pack(model, kernels, lambda: model[0](torch.zeros(1, 40, dtype=BF16)), "int8")
    fuse_modules(model.modules(), DecoderKernels(DecoderKernel(kernels)))
    assert fused_counts(model) == {}


def test_rows_in_fp32_are_left_to_the_modules_own_code(kernels: library.KernelLibrary) -> None:
    model, rows = nn.ModuleList([Norm()]), torch.randn(4, 72)
    theirs = model[0](rows)
    fuse_modules(model.modules(), DecoderKernels(DecoderKernel(kernels)))
    assert "forward" in model[0].__dict__ and torch.equal(model[0](rows), theirs)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    "make",
    [
        Centred,
        Clamped,
        Doubled,
        lambda: nn.LayerNorm(72, bias=False, dtype=BF16),
        lambda: Norm().float(),
        lambda: hooked(Norm()),
        Swapped,
        lambda: Mlp("gelu"),
        lambda: Mlp("relu"),
        lambda: hooked(Mlp()),
        with_a_hooked_projection,
    ],
)
def test_what_computes_something_else_is_left_alone(
    kernels: library.KernelLibrary, make: Callable[[], nn.Module], weights: WeightFormat
) -> None:
    model = nn.ModuleList([make()])
    pack(model, kernels, lambda: isinstance(model[0], Mlp) and model[0](torch.zeros(1, 40, dtype=BF16)), weights)
    assert isinstance(model[0], Norm | nn.LayerNorm) or isinstance(model[0].up_proj, PackedLinear)
    fuse_modules(model.modules(), DecoderKernels(DecoderKernel(kernels)))
    assert fused_counts(model) == {}
