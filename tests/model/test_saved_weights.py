"""Later starts map what the first one packed: the same bits, nothing packed or compared, and never another model's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rekindle.compute.cpu.compute import KernelCompute
from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.compute.cpu.kernels.linear import PackedWeights
from rekindle.compute.cpu.packed_modules import PackedEmbedding, PackedLinear
from rekindle.compute.cpu.packer import KernelPacker
from rekindle.compute.cpu.saved_weights import LEAST_BYTES, SavedWeights, named, place
from rekindle.compute.cpu.weights import Linears, WeightsChoice
from rekindle.compute.cpu.weights_file import Contents, DamagedFile
from rekindle.compute.devices import choose_kernels
from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.model.loaded import LoadedModel
from tests.forks import forking
from tests.kernels.native import needs_kernels
from tests.model.helpers import Bench, random_ids

pytestmark = needs_kernels
KINDS = ("llama", "qwen2", "gemma3", "gemma", "gpt2", "phi3", "mixtral", "qwen3-moe", "gpt-oss")


def load(model: Path | None, state: Path | None, **changes: Any) -> LoadedModel:
    settings = ModelSettings(model=str(model) if model else None, **{"map_weights": "on", **changes})
    return load_model(settings, block_tokens=16, max_context=None, format_map_dir=state)


def first_start(model: Path | None, state: Path, **changes: Any) -> LoadedModel:
    """A start that packs, with what it leaves written."""
    loaded = load(model, state, **changes)
    assert loaded.unsaved is not None
    loaded.unsaved.save()
    return loaded


def files(state: Path) -> list[Path]:
    return sorted(state.glob("packed-*"))


def is_mapped(loaded: LoadedModel) -> bool:
    """Whether all packed weights of a model lie in a file, or none."""
    (answer,) = {not weights.memory.flags.writeable for weights in named(loaded.model).values()}
    return answer


def notes_of(loaded: LoadedModel) -> list[str]:
    return [note for note in loaded.notes if note.startswith("packed weights: ")]


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    (logits,) = Bench(loaded).forward(("a", random_ids(60)))
    return logits


def a_packer() -> KernelPacker:
    found = choose_kernels(ModelSettings(), "cpu").library
    assert found is not None
    return KernelPacker.of(found)


def num_torch(model: nn.Module) -> int:
    return sum(isinstance(module, nn.Linear | Conv1D | nn.Embedding) for module in model.modules())


@pytest.mark.parametrize("weights", ["native", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_start_maps_and_gives_the_same_bits(
    kind: str, weights: Literal["native", "int8"], model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    directory = model_dir(kind, "bf16")
    first = first_start(directory, tmp_path, weights=weights)
    second = load(directory, tmp_path, weights=weights)
    assert not is_mapped(first) and is_mapped(second) and second.unsaved is None
    assert torch.equal(logits_of(first), logits_of(second))
    assert second.spec == first.spec and second.promise == first.promise and second.row_multiple == first.row_multiple
    ours, theirs = named(second.model), named(first.model)
    assert ours.keys() == theirs.keys() and num_torch(second.model) == num_torch(first.model)
    assert len({id(weights) for weights in ours.values()}) == len({id(weights) for weights in theirs.values()})
    (path,), size = files(tmp_path), sum({id(x): x.num_bytes for x in ours.values()}.values())
    assert notes_of(first) == [f"packed weights: {size:,} bytes are kept in {path} for the next start"]
    assert notes_of(second) == [f"packed weights: {size:,} bytes are mapped from {path}"]
    assert sorted(set(first.notes) - set(notes_of(first))) == sorted(set(second.notes) - set(notes_of(second)))


def test_a_tied_embedding_gathers_from_the_mapped_head(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = model_dir("llama", "bf16", tie_word_embeddings=True)
    first_start(directory, tmp_path)
    second = load(directory, tmp_path)
    embedding, head = second.model.get_input_embeddings(), second.model.lm_head
    assert isinstance(embedding, PackedEmbedding) and isinstance(head, PackedLinear)
    assert embedding.packed is head.packed and embedding.weight is head.weight


def test_neither_packing_nor_comparing_happens_again(
    model_dir: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = model_dir("llama", "bf16")
    with caplog.at_level(logging.INFO, "rekindle.compute.cpu.packed"):
        first_start(directory, tmp_path)
        assert "linear layers are packed" in caplog.text
        caplog.clear()
        load(directory, tmp_path)
    assert caplog.text == ""


def test_notes_on_packing_are_repeated(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = model_dir("llama", "bf16")
    unsaved = load(directory, tmp_path).unsaved
    assert unsaved is not None and unsaved.contents.notes == ()
    note = "model.layers.0.mlp.up_proj is left to torch: our kernel gives other outputs"
    fewer = {name: each for name, each in unsaved.contents.weights.items() if name != "model.layers.0.mlp.up_proj"}
    replace(unsaved, contents=Contents(fewer, (note,))).save()
    second = load(directory, tmp_path)
    assert note in second.notes and is_mapped(second)
    assert type(second.model.model.layers[0].mlp.up_proj) is nn.Linear


def test_a_module_in_two_places_is_replaced_in_both(model_dir: Callable[..., Path]) -> None:
    head = load(model_dir("llama", "bf16"), None).model.lm_head
    module = nn.Linear(64, head.packed.columns, bias=False, dtype=torch.bfloat16)
    model = nn.ModuleDict({"a": module, "b": nn.Sequential(module)})
    place(model, a_packer(), {"a": head.packed})
    assert isinstance(model["a"], PackedLinear) and model["a"] is next(iter(model["b"].children()))


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "foreign"])
def test_a_damaged_file_is_packed_and_written_anew(damage: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = model_dir("llama", "bf16")
    wanted = logits_of(first_start(directory, tmp_path))
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[-1000] ^= 4
    path.write_bytes({"cut": whole[:-4096], "changed": changed, "empty": b"", "foreign": b"x" * len(whole)}[damage])
    again = first_start(directory, tmp_path)
    assert not is_mapped(again) and torch.equal(logits_of(again), wanted)
    damaged, kept = notes_of(again)
    assert damaged.startswith(f"packed weights: {path} is not used, as ") and damaged.endswith("they are packed anew")
    assert "are kept in" in kept and path.read_bytes() == whole
    assert is_mapped(load(directory, tmp_path))


def test_other_weights_and_other_formats_have_other_files(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    state = tmp_path / "state"
    one, other = model_dir("llama", "bf16"), model_dir("llama", "bf16", initializer_range=0.2)
    first_start(one, state)
    assert not is_mapped(load(other, state)) and not is_mapped(load(one, state, weights="int8"))
    first_start(one, state, weights="int8")
    assert len(files(state)) == 2 and is_mapped(load(one, state)) and is_mapped(load(one, state, weights="int8"))
    first_start(other, state)
    assert len(files(state)) == 3 and is_mapped(load(one, state))


def test_other_kernels_have_another_file(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = model_dir("llama", "bf16")
    settings = ModelSettings(model=str(directory), device="cpu", map_weights="on")
    known = choose_kernels(settings, "cpu").library
    assert known is not None
    packer = KernelPacker.of(known)

    def saved(library: KernelLibrary) -> SavedWeights:
        inputs = {"weights": "of this model"}
        return SavedWeights(tmp_path, "model", settings, KernelCompute(library), packer, lambda **_: inputs)

    loaded = load(directory, None)
    linears, native = Linears(loaded.model, set(), packer), WeightsChoice("native")
    others = replace(known, digest="of other sources")
    unsaved = [saved(library).pack(linears, native, ()).unsaved for library in (known, others)]
    assert unsaved[0] is not None and unsaved[1] is not None
    unsaved[0].save()
    assert unsaved[0].file.read() is not None and unsaved[1].file.read() is None


def test_a_model_whose_files_change_replaces_its_file(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory, state = tmp_path / "model", tmp_path / "state"
    source, later = model_dir("llama", "bf16"), model_dir("llama", "bf16", initializer_range=0.2)
    directory.mkdir()
    for file in source.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    first_start(directory, state)
    (before,) = files(state)
    for file in later.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    changed = first_start(directory, state)
    (after,) = files(state)
    assert not is_mapped(changed) and before != after
    assert torch.equal(logits_of(load(directory, state)), logits_of(load(later, None)))


def test_small_models_and_those_without_a_directory_are_not_written(tmp_path: Path) -> None:
    loaded = load(None, tmp_path, map_weights="auto")
    assert 0 < sum(weights.num_bytes for weights in named(loaded.model).values()) < LEAST_BYTES
    assert loaded.unsaved is None and notes_of(loaded) == []
    assert load(None, tmp_path, map_weights="off").unsaved is None and load(None, None).unsaved is None
    first_start(None, tmp_path)
    assert is_mapped(load(None, tmp_path, map_weights="auto"))
    assert not is_mapped(load(None, tmp_path, map_weights="off"))


def test_a_model_that_torch_computes_has_no_file(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    assert load(model_dir("llama", "bf16"), tmp_path, kernels="torch").unsaved is None
    assert load(model_dir("llama"), tmp_path).unsaved is None
    first_start(model_dir("llama", "bf16"), tmp_path)
    assert load(model_dir("llama", "bf16"), tmp_path, kernels="torch").compute == KernelCompute(None)


def test_the_decision_of_auto_is_mapped_too(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = model_dir("llama", "bf16")
    first = first_start(directory, tmp_path, weights="auto")
    second = load(directory, tmp_path, weights="auto")
    assert is_mapped(second) and second.spec.fingerprint == first.spec.fingerprint
    (saved,) = tmp_path.glob("weights-*.json")
    saved.unlink()
    assert not is_mapped(load(directory, tmp_path, weights="auto")) and saved.exists()


def test_weights_that_do_not_fit_change_nothing(model_dir: Callable[..., Path]) -> None:
    loaded, other = (load(model_dir(kind, "bf16"), None) for kind in ("mixtral", "llama"))
    kernel = a_packer()
    plain = nn.Sequential(nn.Linear(64, 384, bias=False, dtype=torch.bfloat16), nn.Linear(64, 64, dtype=torch.bfloat16))
    modules = list(plain)
    head: PackedWeights = other.model.lm_head.packed
    assert (head.columns, head.depth) == (384, 64)
    for weights in ({"0": head, "2": head}, {"0": head, "1": head}, named(loaded.model)):
        with pytest.raises(DamagedFile, match="the model has no such"):
            place(plain, kernel, weights)
        assert list(plain) == modules
    place(plain, kernel, {"0": head})
    assert isinstance(plain[0], PackedLinear) and plain[1] is modules[1]


def save_and_tell(directory: Path, place: Path, told: Any) -> None:
    """What each of two processes does."""
    loaded = load(directory, place)
    if loaded.unsaved is not None:
        loaded.unsaved.save()
    told.put(float(logits_of(loaded).double().sum()))


def test_two_processes_share_one_file(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = model_dir("llama", "bf16")
    told = forking().SimpleQueue()
    running = [forking().Process(target=save_and_tell, args=(directory, tmp_path, told)) for _ in range(2)]
    for process in running:
        process.start()
    sums = {told.get() for _ in running}
    for process in running:
        process.join(60)
    assert all(process.exitcode == 0 for process in running) and len(sums) == 1
    assert len(files(tmp_path)) == 1 and not list(tmp_path.glob(".packed-*"))
    assert is_mapped(load(directory, tmp_path))
