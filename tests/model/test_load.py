"""Loading whole directories: the bundled model, dtypes, notes, what the self-test promises."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rekindle.compute.cpu.compute import KernelCompute
from rekindle.compute.cpu.kernels.library import KernelChoice
from rekindle.compute.devices import choose_kernels
from rekindle.compute.load import load_model, read_config
from rekindle.config import ModelSettings
from rekindle.errors import ConfigError
from rekindle.model import checkpoint
from rekindle.model.adapter import register_attention
from rekindle.model.loaded import LoadedModel
from rekindle.model.loader import load_weights
from rekindle.model.padded_experts import mixtures
from tests.model.helpers import Bench, Loader, random_ids, reference_logits
from tests.quantised_models import quantised_dir
from tests.tiny_models import END_ID, EXACT_KINDS, tiny_model


def test_the_bundled_model_is_the_default() -> None:
    loaded = load_model(ModelSettings(), block_tokens=64, max_context=None, format_map_dir=None)
    assert (loaded.spec.name, loaded.dtype, loaded.spec.max_context) == ("pocket", torch.bfloat16, 4096)
    assert loaded.spec.layout.formats() == {"q4h/q4h": 8}
    assert loaded.promise == "bitwise"
    assert loaded.spec.eos_ids and (loaded.directory / "config.json").is_file()


def test_the_kernels_are_those_that_the_setting_names() -> None:
    def load(settings: ModelSettings) -> LoadedModel:
        return load_model(settings, block_tokens=64, max_context=None, format_map_dir=None)

    chosen, kernels = load(ModelSettings()), choose_kernels(ModelSettings(), "cpu")
    assert chosen.compute == KernelCompute(kernels.library)
    noted = [note for note in chosen.notes if note.startswith("kernels: ")]
    assert noted == ([] if kernels.library is not None else [f"kernels: {kernels}"])
    assert load(ModelSettings(kernels="torch")).compute == KernelCompute(None)
    assert str(KernelChoice(None, "they are missing", "build them")) == "torch; they are missing; build them"


def test_kernels_are_for_the_cpu() -> None:
    assert choose_kernels(ModelSettings(), "cuda") == KernelChoice(None)
    with pytest.raises(ConfigError, match="kernels=avx2 is for the CPU, not for cuda: leave it at auto"):
        choose_kernels(ModelSettings(kernels="avx2"), "cuda")


def test_what_a_card_is_to_compute_can_be_loaded_to_the_processor(
    model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """As the processor reads files, so that it can be rounded; experts compute as on the card."""
    register_attention()
    card, mixture = ModelSettings(device="cuda"), model_dir("mixtral", "bf16")
    for settings, held, is_padded in ((card, "cpu", False), (ModelSettings(device="cpu"), None, True)):
        model = load_weights(mixture, read_config(mixture), settings, held=held).model
        assert {each.device.type for each in model.parameters()} == {"cpu"} and any(mixtures(model)) == is_padded
    coded = quantised_dir("fp8", tmp_path)
    model = load_weights(coded, read_config(coded), card, held="cpu").model
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", EXACT_KINDS)
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_every_kind_and_dtype_is_bitwise_on_a_cpu(load: Loader, kind: str, dtype: str) -> None:
    loaded = load(kind, dtype, kv="q4h")
    assert loaded.promise == "bitwise", loaded.notes
    assert loaded.spec.layout.formats() == {"q4h/q4h": 3}
    assert loaded.spec.eos_ids == {END_ID} and loaded.spec.max_context == 1024


def test_loaded_weights_compute_what_the_files_say(load: Loader) -> None:
    loaded = load("qwen3", "fp64", kv="fp32")
    ids = random_ids(30)
    ours = Bench(loaded).forward(("a", ids))[0]
    theirs = reference_logits(loaded.model, ids)
    assert ours.dtype == torch.float64 and (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_max_context_is_at_most_the_models_own(load: Loader) -> None:
    assert load("llama", max_context=512).spec.max_context == 512
    with pytest.raises(ConfigError, match="max_context=1025 is more than the 1024 tokens"):
        load("llama", max_context=1025)
    assert load("llama", max_context=20).spec.max_context == 20


def test_fp16_checkpoints_are_widened_and_said_so(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model_dir("llama"), tmp_path / "half"))
    weights = {name: tensor.half() for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text("utf-8"))
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float16"}), "utf-8")
    loaded = load_model(ModelSettings(model=str(directory)), block_tokens=16, max_context=None, format_map_dir=None)
    assert loaded.dtype == torch.float32
    assert any("fp16" in note for note in loaded.notes)
    assert not any("wider than stored" in note for note in loaded.notes)


def test_expected_bytes_count_floats_at_the_compute_width(model_dir: Callable[..., Path]) -> None:
    files = checkpoint.weight_files(model_dir("llama", "bf16"))
    count = sum(tensor.numel() for tensor in load_file(files[0]).values())
    assert checkpoint.expected_bytes(files, None) == checkpoint.expected_bytes(files, 2) == 2 * count
    assert checkpoint.expected_bytes(files, 8) == 8 * count


def test_longrope_has_one_set_of_factors_for_all_lengths(load: Loader) -> None:
    """A prompt that grows past what the short factors are for gives what transformers gives for its whole length."""
    own, ids = tiny_model("phi3-longrope", torch.float64), random_ids(300)
    long, short = (load("phi3-longrope", "fp64", kv="fp32", max_context=most) for most in (None, 256))
    assert (long.spec.max_context, short.spec.max_context) == (1024, 256)
    for loaded, is_long in ((long, True), (short, False)):
        assert any("long factors for prompts of every length" in note for note in loaded.notes) is is_long
    bench = Bench(long)
    grown = torch.cat([bench.forward(("a", part))[0] for part in (ids[:100], ids[100:])])
    (few,) = Bench(short).forward(("a", ids[:100]))
    for ours, theirs in ((grown, reference_logits(own, ids)), (few, reference_logits(own, ids[:100]))):
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
    assert (few - grown[:100]).abs().max() > 1e-2 * few.abs().max()
    assert short.spec.fingerprint != long.spec.fingerprint, "their K is not the same"
