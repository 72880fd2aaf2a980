"""The bench of the kernels on small figures: every arm that runs here is measured, and computes the same product."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.commands import app
from benchmarks.kernels import KernelBench, Layers, read_shape
from rekindle.compute.cpu.kernels.levels import LEVELS
from rekindle.compute.cpu.kernels.linear import LinearKernel
from rekindle.errors import ConfigError
from tests.kernels.native import built, needs_kernels, runnable


def test_every_product_is_measured_by_torch_at_least(tmp_path: Path) -> None:
    out = tmp_path / "lines"
    command = ["kernels", "--rows", "1", "--rows", "5", "--shape", "70x40", "--repeats", "2", "--out", str(out)]
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, command)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    arms = {line["arm"] for line in lines}
    assert "torch" in arms
    for level in LEVELS:
        assert {f"{level} bf16", f"{level} int8", f"{level} int4"} <= arms or f"{level} is left out" in result.output
    assert {line["measure"] for line in lines} == {"linear 70x40, 1 rows", "linear 70x40, 5 rows"}
    assert {len(line["values"]) for line in lines} == {2 * 24}


@needs_kernels
def test_the_arms_compute_the_same_product() -> None:
    found = built()[runnable()[0]].library
    assert found is not None
    layers = Layers((70, 40), {found.level: LinearKernel(found)}, KernelBench())
    rows = torch.randn(5, 40).to(torch.bfloat16)
    for number in (0, len(layers.weights) - 1):
        expected, ours, in_int8, in_int4 = (multiply(number, rows) for multiply in layers.arms.values())
        torch.testing.assert_close(ours, expected, rtol=2**-7, atol=2**-7)
        for rounded, share in ((in_int8, 0.03), (in_int4, 0.15)):
            assert float((rounded - expected).norm() / expected.norm()) < share


def test_nonsense_is_refused() -> None:
    for text in ("70", "x", "0x40", "-1x40", "ax2"):
        with pytest.raises(ConfigError, match="is no shape"):
            read_shape(text)
    with pytest.raises(ConfigError, match="at least one row"):
        KernelBench(rows=(0,))
