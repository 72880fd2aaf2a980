"""Models of Ollama's folder: a name is resolved to the file of its weights, which is served under that name."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.errors import ModelRefused
from rekindle.model.checkpoint import Source
from rekindle_backends.llama.command import gguf_of
from rekindle_lab.bench.engine.gguf_model import write_gguf
from tests.tiny_models import tiny_model_dir

LAYER = "application/vnd.ollama.image."


class Folder:
    """A folder as Ollama makes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs").mkdir(parents=True)

    def blob(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        (self.root / "blobs" / f"sha256-{digest}").write_bytes(content)
        return f"sha256:{digest}"

    def add(self, place: str, **layers: str) -> None:
        """A manifest at a place, of these layers and their digests."""
        listed = [{"mediaType": LAYER + kind, "digest": digest, "size": 1} for kind, digest in layers.items()]
        self.write(place, json.dumps({"schemaVersion": 2, "layers": listed}))

    def write(self, place: str, text: str) -> None:
        path = self.root / "manifests" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Folder(tmp_path / "models")


def test_a_model_is_served_from_ollamas_file(folder: Folder, tmp_path: Path) -> None:
    write_gguf(tiny_model_dir("llama", "bf16", tmp_path), tmp_path / "tiny.gguf", "q8_0")
    digest = folder.blob((tmp_path / "tiny.gguf").read_bytes())
    file = folder.root / "blobs" / digest.replace(":", "-")
    folder.add("registry.ollama.ai/library/tiny/latest", template=folder.blob(b"{{ .Prompt }}"), model=digest)
    folder.add("hf.co/owner/tiny-GGUF/Q8_0", model=digest)
    folder.add("registry.ollama.ai/me/tiny/1b", model=digest)
    for name in ("tiny", "tiny:latest", "hf.co/owner/tiny-GGUF:Q8_0", "me/tiny:1b"):
        source = Source.find(f"ollama:{name}", None)
        assert (source.name, source.file) == (name, file) and gguf_of(source) == file
    assert Source.find(str(file), None).file == file  # which its name does not say
    loaded = load_model(
        ModelSettings(model="ollama:tiny", kv="bf16", kernels="torch"),
        block_tokens=16,
        max_context=None,
        format_map_dir=None,
    )
    assert (loaded.spec.name, loaded.spec.facts.file_format) == ("tiny", "gguf")


def test_what_is_not_there(folder: Folder) -> None:
    folder.add("registry.ollama.ai/library/tiny/1b", model=f"sha256:{'0' * 64}")
    folder.add("hf.co/owner/other/latest", model=f"sha256:{'0' * 64}")
    with pytest.raises(ModelRefused, match=r"no 'tiny' in .*; it has hf\.co/owner/other:latest, tiny:1b$"):
        Source.find("ollama:tiny", None)
    with pytest.raises(ModelRefused, match=r"lacks its weights, .*sha256-0+: pull it again"):
        Source.find("ollama:tiny:1b", None)


@pytest.mark.parametrize("name", ["", ":tag", "../tiny", "a/../../../b", "a/b/c/d", "tiny:1b:2", "tiny:../../x", "/a"])
def test_what_is_no_name(folder: Folder, name: str) -> None:
    with pytest.raises(ModelRefused, match="is no name of Ollama's"):
        Source.find(f"ollama:{name}", None)


def test_models_that_are_more_or_less_than_a_file(folder: Folder) -> None:
    digest = folder.blob(b"GGUF")
    for name, layers in {
        "tuned": {"model": digest, "adapter": digest},
        "mlx": {"tensor": digest, "json": digest},
    }.items():
        folder.add(f"registry.ollama.ai/library/{name}/latest", **layers)
    folder.add("registry.ollama.ai/library/odd/latest", model="sha256:../../../etc/passwd")
    folder.write("registry.ollama.ai/library/cut/latest", '{"layers": [')
    folder.write("registry.ollama.ai/library/list/latest", '{"layers": [3]}')
    for name, says in {
        "tuned": "has an adapter next to its weights",
        "mlx": "is no GGUF file, but json, tensor",
        "odd": "is no digest",
        "cut": "cannot be read: Expecting",
        "list": "cannot be read: it lists no layers",
    }.items():
        with pytest.raises(ModelRefused, match=says):
            Source.find(f"ollama:{name}", None)


@pytest.mark.timeout(30)  # what is waited for never comes
def test_what_somebody_else_put_there(folder: Folder) -> None:
    library = folder.root / "manifests/registry.ollama.ai/library"
    folder.write("registry.ollama.ai/library/deep/latest", "[" * 100_000)
    folder.write("registry.ollama.ai/library/long/latest", "")
    os.truncate(library / "long/latest", 1 << 40)  # which takes no room
    folder.add("registry.ollama.ai/library/loud/latest", **{"\x1b[2J": folder.blob(b"GGUF")})
    for name in ("pipe", "folder", "outside"):
        (library / name).mkdir()
    os.mkfifo(library / "pipe/latest")
    (library / "folder/latest").mkdir()
    (library / "outside/latest").symlink_to("/etc/passwd")
    for name, says in {
        "deep": "cannot be read: maximum recursion depth",
        "long": "long/latest has more than 1 MiB",
        "loud": r"is no GGUF file, but \\x1b\[2J$",
        "pipe": "pipe/latest is no file",
        "folder": "folder/latest is no file",
        "outside": r"cannot be read: Expecting value: line 1 column 1 \(char 0\)$",  # and no word of it
    }.items():
        with pytest.raises(ModelRefused, match=says):
            Source.find(f"ollama:{name}", None)
    for number in range(30):
        folder.write(f"registry.ollama.ai/library/m{number:02}/latest", "{}")
    with pytest.raises(ModelRefused, match=r"it has deep:latest, .*, more$") as caught:
        Source.find("ollama:none", None)
    assert len(str(caught.value)) < 1000


def test_without_ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "none"))
    with pytest.raises(ModelRefused, match="set OLLAMA_MODELS to it, or name a GGUF file"):
        Source.find("ollama:tiny", None)
    (tmp_path / "letter").write_text("Dear GGUF")
    with pytest.raises(ModelRefused, match="nor a GGUF file"):
        Source.find(str(tmp_path / "letter"), None)
