"""A backend's order of values is learned from what its operator writes, or the backend is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rekindle.errors import ModelRefused
from rekindle_vllm.packing import BlockShape, learn
from tests.vllm.backends import BACKENDS, Backend, backend

SHAPE = BlockShape(tokens=32, heads=2, k_dim=32, v_dim=32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", BACKENDS)
def test_values_are_found_and_put_where_the_backend_has_them(kind: str, dtype: torch.dtype) -> None:
    made = backend(kind, SHAPE, dtype, num_blocks=5)
    values = learn(made.cache, SHAPE, made.write)
    k, v = made.fill(seed=3)
    blocks = torch.tensor([4, 1, 2])
    assert torch.equal(values.k.read(blocks), k[blocks]) and torch.equal(values.v.read(blocks), v[blocks])
    before = made.cache.clone()
    values.k.write(blocks, k[blocks].clone())
    assert torch.equal(made.cache, before)
    values.v.write(torch.tensor([0, 3]), v[[3, 0]])
    assert torch.equal(values.v.read(torch.arange(5)), v[[3, 1, 2, 0, 4]])
    assert torch.equal(values.k.read(torch.arange(5)), k)


@pytest.mark.parametrize("kind", BACKENDS)
def test_learning_leaves_every_block_as_it_was(kind: str) -> None:
    made = backend(kind, SHAPE, torch.bfloat16, num_blocks=3)
    made.fill(seed=1)
    before = made.cache.clone()
    learn(made.cache, SHAPE, made.write, block=1)
    assert torch.equal(made.cache, before)


def test_regular_orders_are_views_and_a_random_one_is_not() -> None:
    views = {kind: learn(made.cache, SHAPE, made.write).k.is_strided for kind, made in _all().items()}
    assert views == {kind: kind != "random" for kind in BACKENDS}


def test_k_and_v_of_other_sizes_are_found() -> None:
    shape = BlockShape(tokens=16, heads=3, k_dim=48, v_dim=16)
    for kind in ("heads first", "random"):
        made = backend(kind, shape, torch.float32, num_blocks=2)
        k, v = made.fill(seed=2)
        values = learn(made.cache, shape, made.write)
        assert torch.equal(values.k.read(torch.arange(2)), k) and torch.equal(values.v.read(torch.arange(2)), v)


def test_a_backend_that_loses_or_changes_values_is_refused() -> None:
    made = backend("heads first", SHAPE, torch.bfloat16, num_blocks=2)

    def careless(k: Tensor, v: Tensor, block: int) -> None:
        made.write(k, v.flip(0) * 2, block)

    with pytest.raises(ModelRefused, match="every value of K and V once"):
        learn(made.cache, SHAPE, careless)


@pytest.mark.parametrize("cache", [torch.zeros(2, 2, 32, 64, dtype=torch.uint8), torch.zeros(2, 2, 32, 63)])
def test_a_cache_that_does_not_hold_the_values_as_they_are_is_refused(cache: Tensor) -> None:
    with pytest.raises(ModelRefused, match="kv_cache_dtype auto"):
        learn(cache, SHAPE, lambda k, v, block: None)


def _all() -> dict[str, Backend]:
    return {kind: backend(kind, SHAPE, torch.bfloat16, num_blocks=2) for kind in BACKENDS}
