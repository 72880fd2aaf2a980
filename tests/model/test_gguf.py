"""GGUF files: served as they are named, with their own tokenizer or the original's beside them, and kept small."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rekindle.compute.cpu.packed import packed_weights
from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.errors import ModelRefused
from rekindle.model import checkpoint, gguf, gguf_tokenizer
from rekindle.model.described import DescribedModel
from rekindle.model.gguf_header import GgufHeader
from rekindle.model.gguf_tokenizer import merges_by_score
from rekindle.model.loaded import LoadedModel
from rekindle.text.messages import Message
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.bench.engine.gguf_file import Value, write_file
from rekindle_lab.bench.engine.gguf_model import contents, write_gguf
from tests.kernels.native import needs_kernels
from tests.model.helpers import Bench, random_ids
from tests.tiny_models import tiny_model_dir

TEXT = "The lighthouse keeper wrote it down; Größe is text as well."  # digits are split otherwise


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rekindle" / "gguf"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return tiny_model_dir("llama", "bf16", tmp_path)


def loaded_from(model: Path | str, **settings: Any) -> LoadedModel:
    return load_model(
        ModelSettings(model=str(model), kv="bf16", **settings),
        block_tokens=16,
        max_context=None,
        format_map_dir=None,
    )


def error(ours: LoadedModel, theirs: LoadedModel) -> float:
    ids = random_ids(40)
    a, b = (Bench(each).forward(("a", ids))[0].float() for each in (ours, theirs))
    return float((a - b).norm() / b.norm())


def test_values_that_are_not_quantised_give_the_originals_bits(original: Path, tmp_path: Path) -> None:
    write_gguf(original, tmp_path / "tiny.gguf", "bf16")
    ours = loaded_from(tmp_path / "tiny.gguf", kernels="torch")
    assert (ours.spec.name, ours.promise) == ("tiny", "bitwise")
    assert error(ours, loaded_from(original, kernels="torch")) == 0.0


def test_halves_are_widened_as_those_of_other_checkpoints_are(original: Path, tmp_path: Path) -> None:
    for kind, dtype in (("f16", torch.float32), ("f32", torch.float32), ("bf16", torch.bfloat16)):
        write_gguf(original, tmp_path / f"{kind}.gguf", kind)
        loaded = loaded_from(tmp_path / f"{kind}.gguf", kernels="torch")
        assert loaded.dtype == dtype
        assert any("the checkpoint is fp16" in note for note in loaded.notes) == (kind == "f16")


@needs_kernels
def test_blocks_keep_their_codes(original: Path, tmp_path: Path) -> None:
    write_gguf(original, tmp_path / "tiny.gguf", "q8_0")
    ours = loaded_from(tmp_path / "tiny.gguf")
    assert {each.format for each in packed_weights(ours.model)} == {"grid8"}
    assert ours.spec.facts.weight_format == "Q8_0"
    assert error(ours, loaded_from(original)) < 0.1
    assert error(ours, loaded_from(tmp_path / "tiny.gguf", kernels="torch")) < 0.03
    assert any("layers keep the file's own codes" in note for note in ours.notes)
    rounded = loaded_from(tmp_path / "tiny.gguf", weights="int8")
    assert {each.format for each in packed_weights(rounded.model)} == {"int8"}
    assert rounded.spec.fingerprint != ours.spec.fingerprint and rounded.spec.facts.weight_format == "int8"
    assert any("weights=int4 rounds" in note for note in loaded_from(tmp_path / "tiny.gguf", weights="int4").notes)
    wide = loaded_from(tmp_path / "tiny.gguf", dtype="fp32")
    assert wide.dtype == torch.float32 and error(wide, loaded_from(original, dtype="fp32")) < 0.1


def test_its_tokenizer_and_template_are_those_of_the_file(original: Path, tmp_path: Path, caches: Path) -> None:
    write_gguf(original, tmp_path / "tiny.gguf", "q8_0")
    directory = checkpoint.Source.find(str(tmp_path / "tiny.gguf"), None).fetch()
    assert directory.parent == caches and (directory / "tiny.gguf").resolve() == tmp_path / "tiny.gguf"
    assert checkpoint.weight_files(directory) == [directory / "tiny.gguf"]
    encoder, own = (PromptEncoder.from_dir(each) for each in (directory, original))
    messages = [Message("user", TEXT)]
    prompts = [each.render_chat(messages) for each in (encoder, own)]
    assert encoder.encode(prompts[0]).tolist() == own.encode(prompts[1]).tolist()
    written = (directory / "config.json").stat().st_mtime_ns
    assert checkpoint.Source.find(str(tmp_path / "tiny.gguf"), None).fetch_description() == directory
    assert (directory / "config.json").stat().st_mtime_ns == written
    write_gguf(original, tmp_path / "tiny.gguf", "bf16")  # another file of the same name
    assert checkpoint.Source.find(str(tmp_path / "tiny.gguf"), None).fetch() != directory
    assert not [path for path in caches.iterdir() if path.name.startswith(".making")]


def edited(original: Path, path: Path, **values: Value | None) -> Path:
    """The file of the model with other values under its keys (`__` is a dot); None: without the key."""
    path.parent.mkdir(exist_ok=True)
    metadata, tensors = contents(original, path.stem, "bf16")
    given = {key.replace("__", "."): value for key, value in values.items()}
    kept = {key: value for key, value in {**metadata, **given}.items() if value is not None}
    write_file(path, kept, tensors)
    return path


def made_of(file: Path) -> Path:
    return checkpoint.Source.find(str(file), None).fetch()


def test_texts_of_an_architecture_that_cannot_be_loaded(original: Path, tmp_path: Path) -> None:
    """A front needs its tokens, template and sizes; nothing can be loaded by them."""
    values: dict[str, Value | None] = {"general__architecture": "another", "another__context_length": 321}
    file = edited(original, tmp_path / "files" / "tiny.gguf", **values)
    source = checkpoint.Source.find(str(file), None)
    directory = source.fetch_texts()
    described = DescribedModel.read(directory)
    assert (described.architecture, described.max_context) == ("another", 321)
    assert (described.vocab_size, described.eos_ids) == (
        (own := DescribedModel.read(original)).vocab_size,
        own.eos_ids,
    )
    encoder, theirs = (PromptEncoder.from_dir(each) for each in (directory, original))
    assert [*encoder.encode(encoder.render_text(TEXT))] == [*theirs.encode(theirs.render_text(TEXT))]
    assert gguf.gguf_in(directory) == directory / "tiny.gguf" and source.fetch_texts() == directory
    with pytest.raises(ModelRefused, match="'another' are not read by transformers"):
        loaded_from(file)
    known = checkpoint.Source.find(str(edited(original, tmp_path / "files" / "known.gguf")), None)
    assert known.fetch_texts() == known.fetch_description()


def test_a_file_that_has_not_changed_is_not_parsed_again(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(original, tmp_path / "tiny.gguf", "q8_0")
    made = made_of(tmp_path / "tiny.gguf")
    counted = gguf.types_and_values(made / "tiny.gguf")
    assert counted[0] == {"F32", "Q8_0"}

    def read(path: Path) -> GgufHeader:
        raise AssertionError(f"{path} is parsed")

    monkeypatch.setattr(GgufHeader, "read", read)
    assert made_of(tmp_path / "tiny.gguf") == made
    assert gguf.types_and_values(made / "tiny.gguf") == counted


def test_another_converter_and_other_content_make_another_directory(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caches: Path
) -> None:
    file = edited(original, tmp_path / "tiny.gguf", general__name="one")
    first = made_of(file)
    monkeypatch.setattr(gguf, "CONVERTER", gguf.CONVERTER + 1)
    second = made_of(file)
    status = file.stat()
    edited(original, file, general__name="two")  # of the same length
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    assert len({first, second, made_of(file)}) == 3
    (caches / "index.json").write_text("no JSON")
    assert made_of(file) not in (first, second), "found again without the index"


def test_names_of_files_in_any_case_and_of_a_single_part(original: Path, tmp_path: Path) -> None:
    for name in ("tiny-Q8.GGUF", "tiny-00001-of-00001.gguf"):
        place = tmp_path / name.lower()
        place.mkdir()
        write_gguf(original, place / name, "bf16")
        for given in (place / name, place):
            loaded = loaded_from(given, kernels="torch")
            assert loaded.promise == "bitwise", given
    write_gguf(original, tmp_path / "tiny-00001-of-00003.gguf", "bf16")
    with pytest.raises(ModelRefused, match="is a part of a GGUF file"):
        made_of(tmp_path / "tiny-00001-of-00003.gguf")


def test_sampling_and_all_ends_are_in_the_generation_config(original: Path, tmp_path: Path) -> None:
    given: dict[str, Value] = {
        "general__sampling__temp": 0.75,
        "general__sampling__top_k": 20,
        "general__sampling__top_p": 0.5,
        "general__sampling__min_p": 0.25,
        "general__sampling__penalty_repeat": 1.5,
        "tokenizer__ggml__eos_token_id": 0,
        "tokenizer__ggml__eot_token_id": 2,
        "tokenizer__ggml__eom_token_id": 1,
    }
    made = made_of(edited(original, tmp_path / "tiny.gguf", **given))
    found = json.loads((made / "generation_config.json").read_text())
    assert found.pop("eos_token_id") == [0, 1, 2]
    del found["pad_token_id"]
    assert found == {
        "temperature": 0.75,
        "top_k": 20,
        "top_p": 0.5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "do_sample": True,
    }
    plain = json.loads((made_of(edited(original, tmp_path / "plain.gguf")) / "generation_config.json").read_text())
    assert not {"do_sample", "temperature"} & plain.keys()


def test_templates_of_several_names_are_read(original: Path, tmp_path: Path) -> None:
    given: dict[str, Value] = {
        "tokenizer__chat_template": "{{ messages[0].content }}",
        "tokenizer__chat_template__tool_use": "{{ tools[0] }}",
    }
    template = PromptEncoder.from_dir(made_of(edited(original, tmp_path / "tiny.gguf", **given))).template
    asked = [{"role": "user", "content": "Hello."}]
    assert (template.render(asked), template.render(asked, ["a tool"])) == ("Hello.", "a tool")
    many: dict[str, Value] = {f"tokenizer__chat_template__t{n}": f"{{{{ {n} }}}}{'x' * 100_000}" for n in range(6)}
    with pytest.raises(ModelRefused, match=r"templates have 600,\d+ characters: at most 524,288"):
        PromptEncoder.from_dir(made_of(edited(original, tmp_path / "many.gguf", **many)))
    bare = edited(original, tmp_path / "bare.gguf", tokenizer__chat_template=None)
    assert not PromptEncoder.from_dir(made_of(bare)).template.exists


def test_what_the_tables_leave_out_is_read(original: Path, tmp_path: Path) -> None:
    metadata, tensors = contents(original, "tiny", "bf16")
    rows = {each.name: each.shape for each in tensors}["token_embd.weight"][0]
    config = json.loads(
        (made_of(edited(original, tmp_path / "a.gguf", llama__vocab_size=7)) / "config.json").read_text()
    )
    assert config["vocab_size"] == rows, "the embedding's rows"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == metadata["llama.attention.key_length"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tokenizer__ggml__eos_token_id": 99_999}, "eos_token_id is 99999, and its tokens are 0 to"),
        ({"tokenizer__ggml__eot_token_id": 1 << 31}, "eot_token_id is 2147483648, and its tokens"),
        ({"tokenizer__ggml__tokens": ["a", "b\x1b", "c", "b\x1b"]}, r"vocabulary has 'b\\x1b' twice, as 1 and 3"),
        ({"tokenizer__ggml__tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokenizer__ggml__tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of texts"),
        ({"tokenizer__ggml__merges": ["a b c"]}, "merges has 'a b c', which is no pair"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizers of the kind bert are not rebuilt"),
        ({"general__architecture": "\x1b[31mred"}, r"architecture '\\x1b\[31mred' are not read"),
        ({"general__architecture": "general"}, "architecture 'general' are not read"),
        ({"general__architecture": None}, "has no general.architecture"),
        ({"llama__rope__scaling__alpha": 2.0}, "llama.rope.scaling.alpha changes the rotary embedding"),
        ({"llama__rope__scaling__type": "dyn\x1b"}, r"rope.scaling.type is 'dyn\\x1b', which is not computed"),
        ({"llama__rope__scaling__attn_factor": 1.5}, "rope.scaling.attn_factor asks for a rotary embedding"),
        ({"llama__attention__head_count": 0}, "cannot be read"),
        ({"llama__block_count": [1, 2]}, "llama.block_count is not a number"),
        ({"general__architecture": "gemma3", "gemma3__block_count": 5000}, "claims 5,000 layers"),
        ({"tokenizer__ggml__tokens": ["a", "b", "a" * 3000]}, "3 tokens of 3,002 characters, 3,000 of them in one"),
    ],
)
def test_values_that_cannot_be_served_are_refused_by_name(
    original: Path, tmp_path: Path, values: dict[str, Value | None], words: str, caches: Path
) -> None:
    file = edited(original, tmp_path / "tiny.gguf", **values)
    with pytest.raises(ModelRefused, match=words) as caught:
        loaded_from(file)
    assert "\x1b" not in str(caught.value)
    assert not list(caches.glob(".making*"))


def test_values_that_no_package_widens_are_named(original: Path, tmp_path: Path, caches: Path) -> None:
    file = edited(original, tmp_path / "tiny.gguf")
    data = bytearray(file.read_bytes())
    name = b"blk.0.attn_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # after its one dimension: the type
    assert data[at : at + 4] == bytes(4)
    data[at] = 26  # I32, as many bytes as F32
    file.write_bytes(data)
    with pytest.raises(ModelRefused, match=r"the tensor blk\.0\.attn_norm\.weight is I32, which is not widened here"):
        loaded_from(file)


def test_pairs_of_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["a" * length for length in range(1, 9)]
    scores, normal = np.zeros(len(words)), np.ones(len(words), bool)
    assert len(merges_by_score(words, scores, normal)) == 28
    monkeypatch.setattr(gguf_tokenizer, "MOST_MERGES", 20)
    with pytest.raises(ValueError, match="more than 20 pairs"):
        merges_by_score(words, scores, normal)


def test_the_originals_small_files_beside_it_are_used(original: Path, tmp_path: Path, caches: Path) -> None:
    write_gguf(original, original / "tiny.gguf", "bf16")
    (original / "model.safetensors").unlink()
    for name in (original, original / "tiny.gguf"):
        assert checkpoint.Source.find(str(name), None).fetch() == original
        assert loaded_from(name, kernels="torch").promise == "bitwise"
    assert not caches.exists()


def test_a_directory_with_one_file_is_served_and_more_are_named(original: Path, tmp_path: Path) -> None:
    place = tmp_path / "files"
    place.mkdir()
    write_gguf(original, place / "a.gguf", "bf16")
    assert loaded_from(place, kernels="torch").promise == "bitwise"
    shutil.copy(place / "a.gguf", place / "b.gguf")
    with pytest.raises(ModelRefused, match=r"several GGUF files \(a.gguf, b.gguf\): name the one to serve"):
        loaded_from(place)
    shutil.copy(original / "config.json", place)
    shutil.copy(original / "tokenizer.json", place)
    assert loaded_from(place / "b.gguf", kernels="torch").promise == "bitwise", "named among several"
    (place / "a.gguf").unlink()
    (place / "b.gguf").rename(place / "b-00001-of-00002.gguf")
    for name in (place, place / "b-00001-of-00002.gguf"):
        with pytest.raises(ModelRefused, match=r"b-00001-of-00002.gguf is a part of a GGUF file: join its parts"):
            loaded_from(name)


def test_names_on_the_hub_have_a_label(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caches: Path
) -> None:
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    with pytest.raises(ModelRefused, match="not in the local hub cache"):
        loaded_from("owner/tiny-GGUF:Q8_0")
    repository = hub / "models--owner--tiny-GGUF"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    write_gguf(original, snapshot / "tiny-q8_0.gguf", "q8_0")
    write_gguf(original, snapshot / "tiny-bf16.gguf", "bf16")
    source = checkpoint.Source.find("owner/tiny-GGUF:Q8_0", None)
    assert (source.name, source.label) == ("owner/tiny-GGUF", "Q8_0")
    assert (source.fetch() / "tiny-q8_0.gguf").is_file()
    for label in ("Q4_K_M", "tiny", "q8"):
        with pytest.raises(ModelRefused, match=f"no single GGUF file whose name ends in {label}: none"):
            loaded_from(f"owner/tiny-GGUF:{label}")
    shutil.copy(snapshot / "tiny-q8_0.gguf", snapshot / "UD-q8_0.gguf")
    with pytest.raises(ModelRefused, match=r"ends in Q8_0: UD-q8_0.gguf, tiny-q8_0.gguf"):
        loaded_from("owner/tiny-GGUF:Q8_0")
    assert (checkpoint.Source.find("owner/tiny-GGUF:tiny-Q8_0", None).fetch() / "tiny-q8_0.gguf").is_file()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(100), b"no such thing" * 10])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, caches: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelRefused, match=r"broken.gguf cannot be read: .*; name the original model"):
        loaded_from(file)
    assert not list(caches.glob("*"))


def test_a_missing_library_is_named(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(original, tmp_path / "tiny.gguf", "bf16")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelRefused, match="pip install gguf"):
        loaded_from(tmp_path / "tiny.gguf")


def test_a_safetensors_model_with_a_gguf_file_beside_it_stays_one(original: Path) -> None:
    write_gguf(original, original / "extra.gguf", "q8_0")
    assert checkpoint.weight_files(original) == [original / "model.safetensors"]
    assert json.loads((original / "config.json").read_text())["model_type"] == "llama"
