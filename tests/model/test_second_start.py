"""The second start from a GGUF file: the same model, bits and facts, and the file is not even opened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rekindle.compute.cpu.packed_modules import PackedEmbedding
from rekindle.model.kept_tensors import is_placeholder
from rekindle.model.loaded import LoadedModel
from rekindle_lab.bench.engine.gguf_file import GgufType, write_file
from rekindle_lab.bench.engine.gguf_model import write_gguf
from tests.kernels.native import needs_kernels
from tests.model.test_gguf_weights import stored
from tests.model.test_saved_weights import files, first_start, is_mapped, load, logits_of, notes_of
from tests.tiny_models import tiny_model, tiny_model_dir

pytestmark = needs_kernels
STARTS = """
import sys
from pathlib import Path
from tests.model.test_saved_weights import first_start, is_mapped, load

opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
model, state = Path(sys.argv[1]), Path(sys.argv[2])
first_start(model, state)
assert any(path.endswith(".gguf") for path in opened)
opened.clear()
assert is_mapped(load(model, state))
assert any(path.endswith(".bin") for path in map(str, state.iterdir()))
assert opened and not [path for path in opened if path.endswith(".gguf")], opened
"""


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tensors_of(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """What is not packed."""
    held = {**loaded.model.state_dict(), **dict(loaded.model.named_buffers())}
    return {name: tensor for name, tensor in held.items() if not is_placeholder(tensor)}


@pytest.mark.parametrize(
    ("kind", "stored", "tied"),
    [("llama", "q8_0", True), ("llama", "q8_0", False), ("qwen2", "q8_0", False), ("llama", "bf16", True)],
)
def test_it_is_the_same_model(kind: str, stored: GgufType, tied: bool, tmp_path: Path) -> None:
    original = tiny_model_dir(kind, "bf16", tmp_path, tie_word_embeddings=tied)
    file, state = tmp_path / "tiny.gguf", tmp_path / "state"
    write_gguf(original, file, stored)
    first = first_start(file, state)
    second = load(file, state)
    assert is_mapped(second) and second.unsaved is None and second.spec == first.spec
    assert torch.equal(logits_of(first), logits_of(second))
    ours, theirs = tensors_of(second), tensors_of(first)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [type(each) for each in second.model.modules()] == [type(each) for each in first.model.modules()]
    assert isinstance(first.model.get_input_embeddings(), PackedEmbedding) == (stored == "q8_0" or tied)
    assert sorted(set(first.notes) - set(notes_of(first))) == sorted(set(second.notes) - set(notes_of(second)))


def test_a_scaled_embedding_is_mapped_with_its_factor(tmp_path: Path) -> None:
    model = tiny_model("gemma3", torch.bfloat16, tie_word_embeddings=True)
    original = tiny_model_dir("gemma3", "bf16", tmp_path, tie_word_embeddings=True)
    (original / "model.safetensors").unlink()
    tensors = [each for each in stored("gemma3", model) if each.name != "output.weight"]
    write_file(original / "tiny.gguf", {"general.architecture": "gemma3"}, tensors)
    first = first_start(original, tmp_path / "state")
    second = load(original, tmp_path / "state")
    ids = torch.arange(60)
    for loaded in (first, second):
        embedding, head = loaded.model.get_input_embeddings(), loaded.model.lm_head
        assert isinstance(embedding, PackedEmbedding) and embedding.packed is head.packed
    assert is_mapped(second) and torch.equal(logits_of(first), logits_of(second))
    theirs = load(original, None, kernels="torch").model.get_input_embeddings()(ids)
    assert torch.equal(second.model.get_input_embeddings()(ids), theirs)


def test_the_file_is_not_opened(tmp_path: Path) -> None:
    write_gguf(tiny_model_dir("llama", "bf16", tmp_path), tmp_path / "tiny.gguf", "q8_0")
    command = [sys.executable, "-c", STARTS, str(tmp_path / "tiny.gguf"), str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert not done.returncode, done.stderr


def test_a_damaged_file_of_weights_is_not_needed(tmp_path: Path) -> None:
    file, state = tmp_path / "tiny.gguf", tmp_path / "state"
    write_gguf(tiny_model_dir("llama", "bf16", tmp_path), file, "q8_0")
    wanted = logits_of(first_start(file, state))
    (path,) = files(state)
    changed = bytearray(path.read_bytes())
    changed[-65] ^= 1
    path.write_bytes(changed)
    again = load(file, state)
    assert not is_mapped(again) and torch.equal(logits_of(again), wanted)
    assert notes_of(again)[0].endswith("they are packed anew")
    write_gguf(tiny_model_dir("llama", "bf16", tmp_path, seed=1), file, "q8_0")
    assert not is_mapped(load(file, state)), "of another file of the same name"
