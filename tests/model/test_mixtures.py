"""Experts in one call: what they give one by one, the same bits in any company, and the rest left alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from rekindle.compute.cpu.experts import pack_experts
from rekindle.compute.cpu.kernels import library
from rekindle.compute.cpu.kernels.experts import ExpertsKernel, MixtureLayer
from rekindle.compute.cpu.kernels.levels import LEVELS
from rekindle.compute.cpu.mixtures import fuse_experts, mixture_layer
from rekindle.compute.cpu.packer import KernelPacker
from rekindle.layer_forms import WeightFormat
from rekindle.model.layer_parts import mixture_parts
from rekindle.model.padded_experts import EXPERTS_NAME, FUSED_NAME, each_padded, padded_experts
from rekindle.model.selftest import self_test
from tests.kernels.native import built, needs_kernels
from tests.model.helpers import in_memory
from tests.tiny_models import tiny_model

pytestmark = needs_kernels
BF16 = torch.bfloat16
SIZE, INNER, EXPERTS = 136, 104, 7  # neither whole panels nor whole blocks
ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, padded_experts)
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> library.KernelLibrary:
    """Each level; the fastest that there is instead of one that this processor does not run."""
    found = built().get(request.param, next(iter(built().values()))).library
    assert found is not None
    return found


class Plain(nn.Module):
    """Experts as most models have them; subclasses are decorated, as the models' are."""

    bias, turned, spread, activation, inner = False, False, 0.3, "silu", INNER

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.act_fn = EXPERTS, ACT2FN[self.activation]
        for name, columns, depth in (("gate_up_proj", 2 * self.inner, SIZE), ("down_proj", SIZE, self.inner)):
            weights = self.spread * torch.randn(EXPERTS, *((depth, columns) if self.turned else (columns, depth)))
            setattr(self, name, nn.Parameter(weights.to(BF16), requires_grad=False))
            if self.bias:
                biases = nn.Parameter(torch.randn(EXPERTS, columns).to(BF16), requires_grad=False)
                setattr(self, f"{name}_bias", biases)

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the implementation that the config names computes this")


@use_experts_implementation
class Silu(Plain):
    pass


@use_experts_implementation
class Wide(Plain):
    inner = 1024


@use_experts_implementation
class Gelu(Plain):
    activation = "gelu_pytorch_tanh"


@use_experts_implementation
class Limited(Plain):
    """As DeepSeek V4's."""

    limit = 2.5

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


@use_experts_implementation(is_concatenated=False, is_transposed=True, has_bias=True)
class Interleaved(Plain):
    """As gpt-oss's."""

    bias, turned, limit, alpha = True, True, 7.0, 1.702

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


@use_experts_implementation(has_bias=True)
class Swish(Plain):
    """As MiniMax M3's, with a bias."""

    bias, swiglu_limit, swiglu_alpha = True, 3.0, 1.5

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.swiglu_limit), up.clamp(-self.swiglu_limit, self.swiglu_limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.swiglu_alpha))


KINDS = (Silu, Gelu, Limited, Interleaved, Swish)


def layer(kind: type[nn.Module], kernels: library.KernelLibrary, weights: WeightFormat = "bf16") -> Any:
    """Packed experts that are computed in one call."""
    torch.manual_seed(0)
    made = kind(SimpleNamespace(_experts_implementation=EXPERTS_NAME))
    model = nn.ModuleList([made])
    pack_experts(model, KernelPacker.of(kernels), weights)
    assert fuse_experts(model, ExpertsKernel(kernels)) == 1
    return made


def rows_of(tokens: int, count: int, *, dtype: torch.dtype = BF16, unused: int = 0) -> Rows:
    """Rows, choices and shares; nobody chooses the first `unused` experts."""
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens, SIZE, generator=generator).to(BF16)
    chosen = torch.randint(unused, EXPERTS, (tokens, count), generator=generator)
    return rows, chosen, torch.rand(tokens, count, generator=generator).to(dtype)


def assert_same(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """The same bits but where one of thousands of exponentials was rounded otherwise, in int8 with its whole row."""
    for ours, theirs in pairs:
        size = float(theirs.float().square().mean().sqrt())
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6 * size)
    assert float(torch.cat([(ours != theirs).flatten() for ours, theirs in pairs]).float().mean()) < 0.01


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_experts_one_by_one(
    kind: type[nn.Module], weights: WeightFormat, kernels: library.KernelLibrary
) -> None:
    experts = layer(kind, kernels, weights)
    for dtype in (BF16, torch.float32):
        pairs = list[tuple[torch.Tensor, torch.Tensor]]()
        for tokens, count, unused in (
            (1, 1, 0),
            (1, 4, 0),
            (2, 3, 5),
            (37, 2, 0),
            (90, 7, 6),
            (300, 4, 2),
            (1700, 2, 6),
        ):
            given = rows_of(tokens, count, dtype=dtype, unused=unused)
            pairs.append((experts(*given), each_padded(experts, *given)))
        assert_same(pairs)


def test_a_token_may_choose_an_expert_twice_or_all(kernels: library.KernelLibrary) -> None:
    experts = layer(Interleaved, kernels)
    rows, _, _ = rows_of(5, 1)
    shares = torch.rand(5, 8).to(BF16)
    choices = (torch.full((5, 8), 3), torch.arange(40).reshape(5, 8) % EXPERTS)
    assert_same([(experts(rows, each, shares), each_padded(experts, rows, each, shares)) for each in choices])


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", [Silu, Wide, Interleaved])
def test_bits_depend_on_no_company_no_cut_and_no_threads(
    kind: type[nn.Module], weights: WeightFormat, kernels: library.KernelLibrary
) -> None:
    experts = layer(kind, kernels, weights)
    given = rows_of(230, 3)
    whole = experts(*given)
    for cut in (1, 7, 64, 101):
        parts = zip(*(each.split(cut) for each in given), strict=True)
        assert torch.equal(torch.cat([experts(*part) for part in parts]), whole)
    back = torch.arange(229, -1, -1)
    assert torch.equal(experts(*(each[back] for each in given))[back], whole)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(experts(*given), whole)
            assert torch.equal(experts(*(each[5:6] for each in given)), whole[5:6])
        finally:
            torch.set_num_threads(1)


def test_values_that_are_not_finite_stay_with_their_token(kernels: library.KernelLibrary) -> None:
    experts = layer(Limited, kernels)
    given = rows_of(20, 3)
    clean = experts(*given)
    given[0][4, 7] = torch.nan
    given[0][11, 0] = torch.inf
    found = experts(*given)
    assert found[4].isnan().all() and not found[11].isfinite().all()
    others = [row for row in range(20) if row not in (4, 11)]
    assert torch.equal(found[others], clean[others])


def test_strides_and_empty_steps(kernels: library.KernelLibrary) -> None:
    experts = layer(Silu, kernels)
    rows, chosen, shares = rows_of(24, 3)
    whole = experts(rows, chosen, shares)
    assert torch.equal(experts(rows[::3], chosen[::3], shares[::3]), whole[::3])
    wide = torch.cat([rows, rows], 1).T.contiguous().T[:, :SIZE]
    assert torch.equal(experts(wide, chosen, shares), whole)
    assert experts(rows[:0], chosen[:0], shares[:0]).shape == (0, SIZE)
    for wrong in (EXPERTS, -1):
        with pytest.raises(IndexError, match="between 0 and 6"):
            experts(rows, chosen.clone().fill_(wrong), shares)


def erf(module: nn.Module) -> None:
    module.act_fn = nn.GELU()


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: output)
    return module


def with_a_norm(module: nn.Module) -> None:
    module.has_post_expert_norm, module.post_expert_norm = True, nn.Identity()


def other_layout(module: Any) -> None:
    module.is_concatenated = False


def wide_biases(module: Any) -> None:
    module.has_bias = True
    module.gate_up_proj_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER), requires_grad=False)
    module.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, SIZE).to(BF16), requires_grad=False)


@use_experts_implementation
class InFp32(Plain):
    """As Beam's: one rounding for the whole gate."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (self.act_fn(gate) * up).to(gate_up.dtype)


@use_experts_implementation(has_bias=True)
class NothingAdded(Swish):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.swiglu_limit), up.clamp(-self.swiglu_limit, self.swiglu_limit)
        return up * (gate * torch.sigmoid(gate * self.swiglu_alpha))


@use_experts_implementation
class Doubling(Plain):
    """Twice the gate, but of another width just that."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (2 if gate.shape[-1] == INNER else 1) * self.act_fn(gate) * up


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_experts_are_fused_whatever_their_weights_are(weights: WeightFormat, kernels: library.KernelLibrary) -> None:
    """In 8 and 4 bits a value beside a rounding's edge moves all outputs: in most of these layers there is one."""
    torch.manual_seed(0)
    config = SimpleNamespace(_experts_implementation=EXPERTS_NAME)
    model = nn.ModuleList([kind(config) for kind in (Wide, Wide, Wide, Interleaved, Swish)])
    pack_experts(model, KernelPacker.of(kernels), weights)
    assert fuse_experts(model, ExpertsKernel(kernels)) == 5


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("change", [erf, hooked, with_a_norm, other_layout, wide_biases])
def test_a_layer_that_computes_something_else_is_left_alone(
    change: Callable[[Any], Any], weights: WeightFormat, kernels: library.KernelLibrary
) -> None:
    torch.manual_seed(0)
    experts = Silu(SimpleNamespace(_experts_implementation=EXPERTS_NAME))
    model = nn.ModuleList([experts])
    change(experts)
    pack_experts(model, KernelPacker.of(kernels), weights)
    assert fuse_experts(model, ExpertsKernel(kernels)) == 0
    given = rows_of(9, 2)
    if change is not wide_biases:  # whose sums are in fp32, which our products do not take
        assert torch.equal(experts(*given), each_padded(experts, *given))


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("kind", [InFp32, NothingAdded, Doubling])
def test_another_gate_is_left_alone(
    kind: type[nn.Module], weights: WeightFormat, kernels: library.KernelLibrary
) -> None:
    model = nn.ModuleList([kind(SimpleNamespace(_experts_implementation=EXPERTS_NAME))])
    pack_experts(model, KernelPacker.of(kernels), weights)
    assert fuse_experts(model, ExpertsKernel(kernels)) == 0


def test_rows_in_fp32_and_weights_of_torch_are_left_alone(kernels: library.KernelLibrary) -> None:
    model = nn.ModuleList([Silu(SimpleNamespace(_experts_implementation=EXPERTS_NAME))])
    assert fuse_experts(model, ExpertsKernel(kernels)) == 0
    experts = layer(Silu, kernels)
    rows, chosen, shares = rows_of(4, 2)
    with pytest.raises(RuntimeError, match="bf16"):
        experts(rows.float(), chosen, shares)


class Router(nn.Module):
    """As gpt-oss's: the softmax of the chosen logits, in bf16."""

    def __init__(self, num_chosen: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.top_k = num_chosen
        self.weight = nn.Parameter(0.3 * torch.randn(EXPERTS, SIZE, generator=generator).to(BF16), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(EXPERTS, generator=generator).to(BF16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(x, self.weight, self.bias)
        return logits, *self.choice(logits)

    def choice(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, chosen = logits.topk(self.top_k)
        return values.softmax(-1), chosen


class OverAll(Router):
    def choice(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares, chosen = logits.float().softmax(-1).topk(self.top_k)
        return shares.to(BF16), chosen


class InWide(OverAll):
    """As Mixtral's: shares stay in fp32 and sum to 1."""

    def choice(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares, chosen = logits.float().softmax(-1).topk(self.top_k)
        return shares / shares.sum(-1, keepdim=True), chosen


class Sigmoid(Router):
    def choice(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares, chosen = logits.float().sigmoid().topk(self.top_k)
        return (shares / shares.sum(-1, keepdim=True)).to(BF16), chosen


class Smallest(Router):
    def choice(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, chosen = logits.topk(self.top_k, largest=False)
        return values.softmax(-1), chosen


class Scaled(Router):
    def choice(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares, chosen = super().choice(logits)
        return 2 * shares, chosen


class Block(nn.Module):
    def __init__(self, router: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, SIZE)
        _, shares, chosen = self.router(rows)
        return self.experts(rows, chosen, shares).reshape(x.shape)


class WithRows(Block):
    """What comes in is added to what experts give."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def mixture_of(block: nn.Module, kernels: library.KernelLibrary) -> MixtureLayer | None:
    parts = mixture_parts(block)
    return None if parts is None else mixture_layer(parts, kernels)


@pytest.mark.parametrize("num_chosen", [1, 3, EXPERTS])
@pytest.mark.parametrize("kind", [Router, OverAll, InWide])
def test_the_experts_that_a_router_chooses(kind: type[Router], num_chosen: int, kernels: library.KernelLibrary) -> None:
    block = Block(kind(num_chosen), layer(Silu, kernels))
    found = mixture_of(block, kernels)
    assert found is not None
    logits = torch.randn(5, EXPERTS).to(BF16)
    logits[0], logits[1, :4], logits[2] = 1.0, 3.0, -torch.inf  # all equal, some equal, all masked
    shares, chosen = block.router.choice(logits)
    ours, ours_shares = torch.empty_like(chosen), torch.empty_like(shares)
    for threads in (1, 2):
        addresses = (each.data_ptr() for each in (logits, ours, ours_shares))
        ExpertsKernel(kernels).choose(found.router, *addresses, rows=5, threads=threads)
        assert ours[0].tolist() == ours[2].tolist() == list(range(num_chosen))
        assert torch.equal(logits.gather(1, ours), logits.gather(1, chosen))
        torch.testing.assert_close(ours_shares, shares, rtol=2**-7, atol=1e-6, equal_nan=True)


def test_shares_that_are_next_to_nothing_are_not_compared(kernels: library.KernelLibrary) -> None:
    """Of logits 70 and more apart, where exponentials lose their bits: in a few of these routers there are some."""
    experts = layer(Silu, kernels)
    for seed in range(6):
        router, generator = Router(), torch.Generator().manual_seed(seed)
        router.weight.copy_(0.6 * torch.randn(EXPERTS, SIZE, generator=generator))
        assert mixture_of(Block(router, experts), kernels) is not None


@pytest.mark.parametrize("router", [Sigmoid, Smallest, Scaled, lambda: hooked(Router()), lambda: Router().float()])
def test_another_router_is_left_alone(router: Callable[[], nn.Module], kernels: library.KernelLibrary) -> None:
    assert mixture_of(Block(router(), layer(Silu, kernels)), kernels) is None


def test_another_block_is_left_alone(kernels: library.KernelLibrary) -> None:
    experts = layer(Silu, kernels)
    assert mixture_of(Block(Router(), experts), kernels) is not None
    assert mixture_of(WithRows(Router(), experts), kernels) is None
    more = Block(Router(), experts)
    more.shared = nn.Identity()
    assert mixture_of(more, kernels) is None


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_a_model_gives_the_same_bits_on_every_path(
    kind: str, weights: WeightFormat, kernels: library.KernelLibrary
) -> None:
    model = tiny_model(kind, BF16)
    in_memory(model)
    assert pack_experts(model, KernelPacker.of(kernels), weights) == []
    assert fuse_experts(model, ExpertsKernel(kernels)) == 3
    assert sum(hasattr(module, FUSED_NAME) for module in model.modules()) == 3
    assert self_test(in_memory(model, kv="q4h")).promise == "bitwise"
