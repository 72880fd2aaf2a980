"""Models that cannot be served are refused at load, each with its reason and what would fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rekindle.compute.cpu.weights import check_ids
from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.errors import ConfigError, ModelRefused
from rekindle.model import adapter, geometry, trial
from rekindle.text.prompt import PromptEncoder
from tests.model.helpers import Loader, in_memory
from tests.tiny_models import tiny_model


def try_load(directory: Path | str, **settings: Any) -> None:
    load_model(ModelSettings(model=str(directory), **settings), block_tokens=16, max_context=None, format_map_dir=None)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("stablelm", "does not pass keywords on to its attention"),
        ("falcon", "falcon cannot be loaded: .* attention interface of transformers are served"),
        ("jamba", "JambaMambaMixer does not go on from its state: .* differ by 0"),
        ("minimax", "MiniMax uses cache of its own"),
        ("llama4", r"kind chunked_attention: they attend within chunks, .*; served are Llama 3"),
        ("deepseek-v32", r"kind indexed_attention: they choose .* by an index .*; served are DeepSeek V3"),
        ("llama-dynamic", "dynamic changes with the length .* max_context=1024"),
    ],
)
def test_each_failure_has_its_reason(load: Loader, kind: str, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        load(kind)


@pytest.mark.parametrize(("kind", "reason"), [("llama4", "chunked_attention"), ("deepseek-v32", "by an index")])
def test_what_a_config_shows_is_refused_before_weights_are_read(
    model_dir: Callable[..., Path], tmp_path: Path, kind: str, reason: str
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    shutil.copy(model_dir(kind) / "config.json", directory)
    with pytest.raises(ModelRefused, match=reason):
        try_load(directory)


def test_dynamic_rope_is_served_where_it_does_not_change(load: Loader) -> None:
    assert load("llama-dynamic", max_context=1024).spec.max_context == 1024
    with pytest.raises(ModelRefused, match="dynamic changes with the length"):
        load("llama-dynamic")


def test_recurrent_layers_are_found_without_their_names() -> None:
    adapter.register_attention()
    model = tiny_model("qwen3-next", torch.float32)
    model.set_attn_implementation("rekindle")
    found = geometry.probe(model)
    assert [type(each.module).__name__ for each in found.recurrent] == ["Qwen3NextGatedDeltaNet"] * 2
    assert [each.state.index for each in found.recurrent] == [0, 2]
    assert [(each.kind, each.dtype) for each in found.states[0].tensors] == [("conv", "fp32"), ("recurrent", "fp32")]


def test_layers_that_neither_attend_nor_keep_a_state_are_refused() -> None:
    adapter.register_attention()
    model = tiny_model("llama", torch.float32)
    model.set_attn_implementation("rekindle")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelRefused, match=r"layers \[1\] .* neither attend .* nor keep a state"):
        geometry.probe(model)


@pytest.fixture
def copied(model_dir: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir("llama"), tmp_path / "model"))


def test_missing_weights_are_refused_and_unused_ones_noted(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    extra = {**weights, "model.layers.9.self_attn.k_proj.weight": torch.zeros(4, 4)}
    save_file(extra, copied / "model.safetensors", {"format": "pt"})
    loaded = load_model(ModelSettings(model=str(copied)), block_tokens=16, max_context=None, format_map_dir=None)
    assert any("1 tensors of the checkpoint are not used" in note for note in loaded.notes)
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelRefused, match=r"lacks 1 weights .* model.layers.1.self_attn.k_proj.weight"):
        try_load(copied)


def test_damaged_and_absent_files_are_refused(copied: Path) -> None:
    weights = copied / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ModelRefused, match="where its header promises"):
        try_load(copied)
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelRefused, match="not a safetensors file or is cut short"):
        try_load(copied)
    weights.rename(copied / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match=r"no model.safetensors and no GGUF file; pickles are not read"):
        try_load(copied)
    weights.write_bytes(whole)
    (copied / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelRefused, match="PEFT adapter: merge it"):
        try_load(copied)
    (copied / "adapter_config.json").unlink()
    (copied / "tokenizer.json").unlink()
    with pytest.raises(ModelRefused, match=r"no tokenizer.json"):
        try_load(copied)
    (copied / "config.json").unlink()
    with pytest.raises(ModelRefused, match=r"no config.json"):
        try_load(copied)


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (10**9, "num_hidden_layers must be a number from 1 to 4096, not 1000000000"),
        ("x", "num_hidden_layers must be a number from 1 to 4096, not 'x'"),
        (-1, "num_hidden_layers must be"),
        (None, "num_hidden_layers must be"),
    ],
)
def test_a_number_of_layers_that_no_model_has_is_refused_unread(copied: Path, layers: Any, reason: str) -> None:
    change_json(copied / "config.json", num_hidden_layers=layers)
    with pytest.raises(ModelRefused, match=f"config.json: {reason}"):
        try_load(copied)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "x"},
        {"hidden_size": 0},
        {"hidden_size": -64},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 7},
        {"num_key_value_heads": None, "num_attention_heads": "many"},
        {"intermediate_size": []},
        {"vocab_size": -1},
        {"max_position_embeddings": "long"},
        {"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1e4}},
        {"hidden_act": 3},
        {"model_type": ["llama"]},
        {"dtype": "float3"},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_configs_with_nonsense_are_refused(copied: Path, changes: dict[str, Any]) -> None:
    change_json(copied / "config.json", **changes)
    with pytest.raises(ModelRefused):
        try_load(copied)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model_type": ', "\ud800", "[" * 100_000], ids=range(6))
def test_a_config_that_is_none_is_refused(copied: Path, content: str) -> None:
    (copied / "config.json").write_text(content, "utf-8", "surrogatepass")
    with pytest.raises(ModelRefused, match=r"config\.json"):
        try_load(copied)


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_shard_that_lacks_is_named(copied: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelRefused, match=r"lacks 2 of 2 weight files, first model-00001-of-00002"):
        try_load(copied)


def test_names_that_are_no_model_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelRefused, match="there is no such directory"):
        try_load(tmp_path / "nothing")
    with pytest.raises(ModelRefused, match=r"not in the local hub cache .*`hf download nobody/nothing-here`"):
        try_load("nobody/nothing-here")
    with pytest.raises(ModelRefused, match="neither a directory nor a hub name"):
        try_load("no body/..x")


def test_a_tokenizer_that_makes_its_library_panic_is_refused(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model_dir("llama"), tmp_path / "model"))
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text("utf-8"))
    data["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.write_text(json.dumps(data), "utf-8")
    with pytest.raises(ModelRefused, match=r"tokenizer\.json cannot be loaded.*Cannot parse precompiled_charsmap"):
        PromptEncoder.from_dir(directory)
    with pytest.raises(ModelRefused, match=r"tokenizer\.json cannot be loaded.*Cannot parse precompiled_charsmap"):
        check_ids(directory, 100)


def test_a_device_torch_cannot_use_is_the_operators_error(model_dir: Callable[..., Path]) -> None:
    for device in ("nonsense", "cuda:99"):
        with pytest.raises(ConfigError, match=f"device={device} cannot be used"):
            try_load(model_dir("llama"), device=device)


def test_unknown_arguments_of_attention_raise() -> None:
    module = torch.nn.Linear(1, 1)
    with pytest.raises(ModelRefused, match="Linear does not say which layer it is"):
        adapter.read_call(module, torch.zeros(1, 1, 4, 8), {}, 0)
    module.layer_idx = 3
    with pytest.raises(ModelRefused, match="layer 3 passes position_bias"):
        adapter.read_call(module, torch.zeros(1, 1, 4, 8), {"position_bias": torch.zeros(1)}, 0)
    with pytest.raises(ModelRefused, match="not causal"):
        adapter.read_call(module, torch.zeros(1, 1, 4, 8), {"is_causal": False}, 0)
    harmless = {"position_bias": None, "position_ids": torch.zeros(1), "scaling": 0.5, "sliding_window": 0}
    read = adapter.read_call(module, torch.zeros(1, 1, 4, 8), harmless, 0)
    assert (read.scaling, read.window, read.softcap, read.sinks) == (0.5, None, None, None)


@pytest.mark.parametrize("broken", ["mask", "bias", "scaling"])
def test_the_trial_forward_finds_attention_that_is_not_passed_on(broken: str) -> None:
    model = tiny_model("llama", torch.float32)
    for layer in model.model.layers:
        attention = layer.self_attn
        original = attention.forward

        def changed(*args: Any, _of: Any = attention, _forward: Any = original, **kwargs: Any) -> Any:
            ours = _of.config._attn_implementation == "rekindle"
            if broken == "scaling":
                _of.scaling = 0.2 if ours else 0.3
            output, weights = _forward(*args, **kwargs)
            if broken == "bias" and not ours:
                output = output + 0.5
            if broken == "mask" and not ours:
                output = output.flip(1)
            return output, weights

        attention.forward = changed
    with pytest.raises(ModelRefused, match="other results than the model's own attention"):
        trial.trial_forward(in_memory(model), torch.float32)


def test_weights_that_are_not_finite_are_refused() -> None:
    model = tiny_model("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(ModelRefused, match="not finite"):
        trial.trial_forward(in_memory(model), torch.float32)


def test_a_sliding_layer_that_hides_its_window_is_refused() -> None:
    model = tiny_model("gemma3", torch.float32)
    model.model.layers[2].self_attn.sliding_window = None
    with pytest.raises(ModelRefused, match="layer 2 is sliding_attention but asks attention for window None"):
        in_memory(model)


def test_q4h_is_refused_for_head_sizes_it_cannot_hold() -> None:
    model = tiny_model("llama", torch.float32, head_dim=24)
    with pytest.raises(ModelRefused, match=r"by 16 and not by 1024; layer 0 has 24/24: use kv=auto"):
        in_memory(model, kv="q4h")
