"""The trial at load on tiny models: each family passes, and is refused if its own attention does something else.

`make models` takes a tiny model of every type; the usual run takes one of each kind of family, and of each mutant.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rekindle.compute.cpu.compute import KernelCompute
from rekindle.errors import ModelRefused
from rekindle.kv.arena import KVArena
from rekindle.model import trial
from rekindle.model.loaded import LoadedModel
from rekindle.model.runner import LaunchedStep, ModelRunner, SequenceStep
from tests.engine.test_families import ALL, OF_EACH_KIND
from tests.model.helpers import in_memory
from tests.model.own_mutants import MUTANTS, changed_attention
from tests.tiny_models import tiny_model

CHOSEN = ALL if os.environ.get("FAMILIES") == "all" else [*OF_EACH_KIND, "gemma2", "gemma4", "gpt-oss"]
DTYPES = (torch.bfloat16, torch.float32)


def mutants_of(loaded: LoadedModel) -> set[str]:
    """The mutants of what a model's attention has."""
    has = {
        "window": any(layer.window for layer in loaded.spec.layout.layers),
        "softcap": bool(getattr(loaded.model.config, "attn_logit_softcapping", None)),
        "sink": any(name.endswith("sinks") for name, _ in loaded.model.named_parameters()),
    }
    return {kind for kind in MUTANTS if has.get(kind, True)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CHOSEN)
def test_a_family_passes_and_each_of_its_mutants_is_refused(kind: str, dtype: torch.dtype) -> None:
    loaded = in_memory(tiny_model(kind, dtype))
    trial.trial_forward(loaded, dtype)
    kinds = mutants_of(loaded)
    assert kinds >= {"mask", "scale", "position", "rotation"}
    for name in sorted(kinds):
        with changed_attention(loaded, name) as calls:
            with pytest.raises(ModelRefused, match=r"other results .* attention call "):
                trial.trial_forward(loaded, dtype)
            assert calls


def test_a_refusal_names_the_settings_that_may_serve_the_model() -> None:
    for dtype, expected in ((torch.bfloat16, "dtype=fp32"), (torch.float32, "it does something")):
        loaded = in_memory(tiny_model("llama", dtype))
        with changed_attention(loaded, "scale"), pytest.raises(ModelRefused) as refused:
            trial.trial_forward(loaded, dtype)
        assert refused.value.remedy.startswith(expected) and str(refused.value).endswith(refused.value.remedy)


class OwnRunner(KernelCompute):
    """Serves a model by a runner of its own, which forgets to scale its logits."""

    def runner(self, loaded: LoadedModel, arena: KVArena) -> ModelRunner:
        runner = super().runner(loaded, arena)
        launch = runner.launch

        def unscaled(steps: Sequence[SequenceStep]) -> LaunchedStep:
            launched = launch(steps)
            launched.logits = launched.logits * 1.5
            return launched

        runner.launch = unscaled
        return runner


def test_what_serves_a_model_is_what_its_trial_runs() -> None:
    loaded = in_memory(tiny_model("llama", torch.float32))
    trial.trial_forward(replace(loaded, compute=KernelCompute(None)), torch.float32)
    with pytest.raises(ModelRefused, match="median row of logits"):
        trial.trial_forward(replace(loaded, compute=OwnRunner(None)), torch.float32)
