"""The wheels, in environments that know nothing of this checkout: an answer with extras, the cache without.

Heavy packages are lent by the running environment instead of being installed again: all of them to the first
environment, numpy alone to the second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
SITE = Path(np.__file__).parents[1]
MOST_BYTES = 1_000_000  # of the library: the weights of the bundled model are a wheel of their own
ANSWER = """
import pathlib, sys, rekindle, rekindle_pocket
for package in (rekindle, rekindle_pocket):
    assert pathlib.Path(package.__file__).is_relative_to(sys.prefix), package.__file__
from rekindle import Engine
with Engine.from_pretrained(store=sys.argv[1], threads=1, hot_bytes="64MiB") as engine:
    reply = engine.chat("ada", [{"role": "user", "content": "Who are you?"}], temperature=0, max_tokens=8)
    assert reply.token_ids, reply
    print(reply.finish_reason, reply.report.outcome)
"""
CACHE = """
import importlib.util, sys
import rekindle.cache
missing = ["torch", "tokenizers", "transformers", "fastapi", "httpx", "typer", "platformdirs"]
assert not any(importlib.util.find_spec(name) for name in missing)
from rekindle.cache import BlockPool, CacheManager, analyze_batch
pool = BlockPool(4, 16)
assert pool.allocate() is not None
cache = CacheManager(keys="text")
cache.store("a prompt", 1)
assert cache.lookup("a prompt and more").payload == 1
assert analyze_batch(["a b", "a c"], keys="text").distinct_tokens == 4
print("ok")
"""
WITHOUT_MODEL = """
from rekindle import pocket
from rekindle.errors import ConfigError
try:
    pocket.model_dir()
except ConfigError as error:
    print(error)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed, without this checkout on its path."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(project: Path, target: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", target, cwd=project)
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def pocket_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT / "pocket", tmp_path_factory.mktemp("pocket"))


def environment(directory: Path) -> tuple[Path, Path]:
    """An empty environment: its Python and its site-packages."""
    run(sys.executable, "-m", "venv", "--without-pip", directory, cwd=directory.parent)
    scheme = {"base": str(directory), "platbase": str(directory)}
    return directory / "bin" / "python", Path(sysconfig.get_path("purelib", "venv", scheme))


def install(python: Path, *what: str | Path) -> None:
    """Without an index: what the environment lacks is an error."""
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index")
    run(*pip, *what, cwd=python.parent)


def test_the_wheel_holds_what_it_needs(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "py.typed",
        "scenarios/committee.yaml",
        "scenarios/router/lighthouse.md",
        "server/page/static/index.html",
    ):
        assert f"rekindle/{wanted}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if not name.startswith("rekindle") or name.endswith(".safetensors")]
    assert wheel.stat().st_size < MOST_BYTES


def test_the_model_is_a_wheel_that_serve_brings_along(wheel: Path, pocket_wheel: Path) -> None:
    names = zipfile.ZipFile(pocket_wheel).namelist()
    for wanted in ("py.typed", "model/model.safetensors", "model/config.json", "model/tokenizer.json"):
        assert f"rekindle_pocket/{wanted}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if not name.startswith("rekindle_pocket")]
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("dist-info/METADATA"))
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    (needed,) = (line for line in lines if line.startswith("Requires-Dist: rekindle-pocket"))
    assert "extra == 'serve'" in needed


def test_installed_wheels_answer(wheel: Path, pocket_wheel: Path, tmp_path: Path) -> None:
    python, site = environment(tmp_path / "env")
    (site / "lent.pth").write_text(f"{SITE}\n")
    install(python, "--no-deps", wheel, pocket_wheel)
    assert "miss" in run(python, "-c", ANSWER, tmp_path / "store", cwd=tmp_path)
    assert "serve" in run(tmp_path / "env" / "bin" / "rekindle", "--help", cwd=tmp_path)


def test_without_extras_the_cache_needs_numpy_alone(wheel: Path, tmp_path: Path) -> None:
    python, site = environment(tmp_path / "env")
    for path in SITE.glob("numpy*"):
        (site / path.name).symlink_to(path)
    install(python, wheel)
    assert run(python, "-c", CACHE, cwd=tmp_path) == "ok\n"
    assert "pip install rekindle-pocket" in run(python, "-c", WITHOUT_MODEL, cwd=tmp_path)
