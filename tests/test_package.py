"""The wheels, in environments without this checkout and without a compiler: answers and the demo with extras, the
kernels and the cache without.

Heavy packages are lent by the running environment instead of being installed again: all of them where something is
served, elsewhere numpy alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from rekindle.compute.cpu.kernels import build
from rekindle.compute.cpu.kernels.levels import LEVELS, library_name
from tests.kernels.native import can_compile, needs_kernels, runnable, sources

ROOT = Path(__file__).parents[1]
SITE = Path(np.__file__).parents[1]
EXTENSIONS = ("backends", "cuda", "lab", "models", "sessions", "tier", "vllm")
MOST_BYTES = 1_300_000  # without the kernels' libraries; the weights of the bundled model are a wheel of their own
ANSWER = """
import pathlib, sys, rekindle, rekindle_pocket
for package in (rekindle, rekindle_pocket):
    assert pathlib.Path(package.__file__).is_relative_to(sys.prefix), package.__file__
from rekindle import Engine
with Engine.from_pretrained(store=sys.argv[1], threads=1, hot_bytes="64MiB") as engine:
    reply = engine.chat("ada", [{"role": "user", "content": "Who are you?"}], temperature=0, max_tokens=8)
    assert reply.token_ids, reply
    print(reply.finish_reason, reply.report.outcome, *engine.notes, sep="\\n")
"""
KERNELS = """
import sys
from rekindle.compute.cpu.kernels.library import load
for level in sys.argv[1:]:
    library = load(level).library
    assert library.path.is_relative_to(sys.prefix), library
    print(library.level)
assert "torch" not in sys.modules  # its OpenMP is found all the same
"""
NATIVE = "from rekindle.compute.cpu.kernels import build; print(build.NATIVE)"
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
TRACE = "".join(
    f'{{"timestamp": {at}, "input_length": 1024, "output_length": 1, "hash_ids": [1, {at}]}}\n' for at in range(9)
)
CONNECTOR = """
import rekindle_vllm.planner, rekindle_vllm.codec, sys
assert rekindle_vllm.__file__.startswith(sys.prefix) and "rekindle.engine" not in sys.modules
"""
CARDS = """
from rekindle.extensions import extensions, load
print(load(extensions("rekindle.cards")[0]).__module__)
"""
WITHOUT_MODEL = """
from rekindle import pocket
from rekindle.errors import ConfigError
try:
    pocket.model_dir()
except ConfigError as error:
    print(error)
"""


def completed(*command: str | Path, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command that succeeded, without this checkout on its path; `path`: the only directory of programs it has."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if path is not None:
        env |= {"PATH": str(path), "CXX": ""}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command where nothing but the environment of its program is on the PATH."""
    return completed(*command, cwd=cwd, path=Path(command[0]).parent).stdout


def built(project: Path, target: Path, *, what: str = "wheel", path: Path | None = None) -> tuple[Path, str]:
    """What hatchling makes of a project, and what it prints; `path` as `completed` takes it."""
    command = (sys.executable, "-m", "hatchling", "build", "-t", what, "-d", target)
    printed = completed(*command, cwd=project, path=path).stderr
    (made,) = target.iterdir()
    return made, printed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))[0]


@pytest.fixture(scope="module")
def pocket_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT / "pocket", tmp_path_factory.mktemp("pocket"))[0]


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels that are built on the core."""
    return {name: built(ROOT / "packages" / name, tmp_path_factory.mktemp(name))[0] for name in EXTENSIONS}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked: no library is in it."""
    directory = tmp_path_factory.mktemp("sdist")
    packed, _ = built(ROOT, directory / "packed", what="sdist")
    with tarfile.open(packed) as archive:
        archive.extractall(directory, filter="data")
    (project,) = directory.glob("rekindle-*")
    assert (project / "src/rekindle/compute/cpu/kernels/native/simd.hpp").is_file()
    assert not list(project.rglob("*.so"))
    return project


@pytest.fixture(scope="module")
def bare_wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built where no compiler is."""
    made, printed = built(unpacked, tmp_path_factory.mktemp("bare"), path=unpacked)
    assert printed.startswith("no kernels for ") and "through torch" in printed
    return made


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
        "server/page/static/index.html",
        "compute/cpu/kernels/native/simd.hpp",
    ):
        assert f"rekindle/{wanted}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if not name.startswith("rekindle") or name.endswith(".safetensors")]
    libraries = sum(info.compress_size for info in zipfile.ZipFile(wheel).infolist() if info.filename.endswith(".so"))
    assert wheel.stat().st_size - libraries < MOST_BYTES


@needs_kernels
def test_the_wheel_takes_the_kernels_along_and_is_for_one_platform(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith(".so")] == sorted(
        f"rekindle/compute/cpu/kernels/{library_name(level)}" for level in LEVELS
    )
    assert re.fullmatch(r"rekindle-[\d.]+-py3-none-(many)?linux_\w*x86_64\.whl", wheel.name)
    (about,) = (name for name in names if name.endswith("dist-info/WHEEL"))
    assert "Root-Is-Purelib: false" in zipfile.ZipFile(wheel).read(about).decode()


def test_without_a_compiler_the_wheel_is_for_every_platform(bare_wheel: Path) -> None:
    assert bare_wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(bare_wheel).namelist() if name.endswith(".so")]


@needs_kernels
def test_an_editable_install_compiles_in_place(unpacked: Path, tmp_path: Path) -> None:
    project = shutil.copytree(unpacked, tmp_path / "project")
    native = project / "src/rekindle/compute/cpu/kernels/native"
    shutil.rmtree(native)
    sources(native)  # which take a moment
    made, printed = built(project, tmp_path / "made", what="wheel:editable")
    assert made.name.endswith("-py3-none-any.whl") and "kernels for avx2: librekindle-avx2.so compiled by" in printed
    found = sorted(path.name for path in native.parent.glob("*.so"))
    assert found == sorted(map(library_name, LEVELS))


def test_the_model_is_a_wheel_that_serve_brings_along(wheel: Path, pocket_wheel: Path) -> None:
    names = zipfile.ZipFile(pocket_wheel).namelist()
    for wanted in ("py.typed", "model/model.safetensors", "model/config.json", "model/tokenizer.json"):
        assert f"rekindle_pocket/{wanted}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if not name.startswith("rekindle_pocket")]
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("dist-info/METADATA"))
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    assert [line for line in lines if re.fullmatch(r"Requires-Dist: rekindle-pocket.*extra == 'serve'", line)]


def served(directory: Path, *wheels: Path) -> Path:
    """The Python of an environment with these wheels and everything else that they need."""
    python, site = environment(directory)
    lent = directory / "lent"
    lent.mkdir()
    for path in SITE.iterdir():
        if "rekindle" not in path.name:
            (lent / path.name).symlink_to(path)
    (site / "lent.pth").write_text(f"{lent}\n")
    install(python, "--no-deps", *wheels)
    return python


def test_installed_wheels_answer_and_play_the_demo(
    wheel: Path, pocket_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for somebody who keeps a key in the environment."""
    python = served(tmp_path / "env", wheel, pocket_wheel)
    answer = run(python, "-c", ANSWER, tmp_path / "store", cwd=tmp_path)
    assert "miss" in answer
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(wheel).namelist()) or "kernels: " not in answer
    assert "serve" in run(python.with_name("rekindle"), "--help", cwd=tmp_path)
    monkeypatch.setenv("REKINDLE_API_KEY", "secret")
    monkeypatch.setenv("COLUMNS", "120")
    flags = ("--seed", "11", "--threads", "1", "--hot-bytes", "256MiB")
    shown = run(python.with_name("rekindle"), "demo", *flags, cwd=tmp_path)
    assert shown.count("holds") == 3 and shown.count("same reply") == 24 and "kill -9" in shown


@pytest.mark.parametrize("name", EXTENSIONS)
def test_a_wheel_on_the_core_has_its_own_package_alone(extensions: dict[str, Path], name: str) -> None:
    names = zipfile.ZipFile(extensions[name]).namelist()
    package = extensions[name].name.partition("-")[0]
    assert package == f"rekindle_{name}"
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= set(names)
    if package == "rekindle_sessions":
        wanted = (
            "scenarios/committee.yaml",
            "scenarios/router/lighthouse.md",
            "page/sessions.html",
            "page/sessions.js",
        )
        assert {f"{package}/{name}" for name in wanted} <= set(names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {package}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_a_wheel_on_the_core_adds_what_the_core_and_other_wheels_have_not(
    wheel: Path, pocket_wheel: Path, extensions: dict[str, Path], tmp_path: Path
) -> None:
    python = served(tmp_path / "env", wheel, pocket_wheel)
    (tmp_path / "trace.jsonl").write_text(TRACE)
    rekindle = str(python.with_name("rekindle"))
    front = [rekindle, "serve", "--port", "0", "--store", "off", "--backend", "openai=http://127.0.0.1:9"]
    commands = {
        "lab": ("lab", [rekindle, "simulate", "trace.jsonl"], 0, "0.444"),
        "models": ("serve", [rekindle, "pull", "pocket"], 0, "pocket is here"),
        "sessions": ("serve", [rekindle, "run"], 0, "committee"),
        "backends": ("backends", front, 2, "no server answers at http://127.0.0.1:9"),
    }
    for name, (extra, command, code, shown) in commands.items():
        alone = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert alone.returncode == 2 and f"pip install 'rekindle[{extra}]'" in alone.stderr, name
        install(python, "--no-deps", extensions[name])
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code and shown in done.stdout + done.stderr, name
    install(python, "--no-deps", extensions["vllm"])
    run(python, "-c", CONNECTOR, cwd=tmp_path)
    install(python, "--no-deps", extensions["cuda"])
    assert run(python, "-c", CARDS, cwd=tmp_path) == "rekindle_cuda.compute\n"


def test_a_wheel_that_does_not_fit_is_named_and_left_out(wheel: Path, pocket_wheel: Path, tmp_path: Path) -> None:
    python = served(tmp_path / "env", wheel, pocket_wheel)
    about = tmp_path / "env" / "lent" / "rekindle_lab-0.0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rekindle-lab\nVersion: 0.0.1\n")
    (about / "entry_points.txt").write_text("[rekindle.commands]\nlab = rekindle_lab.cli:add_commands\n")
    done = completed(python.with_name("rekindle"), "models", cwd=tmp_path)
    assert "rekindle-lab 0.0.1 does not fit this version" in done.stderr and "Llama" in done.stdout


def test_without_kernels_the_same_wheel_answers_and_says_what_is_missing(
    bare_wheel: Path, pocket_wheel: Path, tmp_path: Path
) -> None:
    python = served(tmp_path / "env", bare_wheel, pocket_wheel)
    answer = run(python, "-c", ANSWER, tmp_path / "store", cwd=tmp_path).splitlines()
    assert answer[1] == "miss"
    (note,) = (line for line in answer if line.startswith("kernels: "))
    assert note.startswith("kernels: torch; ")
    if runnable() and can_compile():
        assert note.endswith("install g++, then run python -m rekindle.compute.cpu.kernels.build")
        native = Path(run(python, "-c", NATIVE, cwd=tmp_path).strip())
        assert {path.name for path in native.iterdir()} == {path.name for path in build.NATIVE.iterdir()}
        shutil.rmtree(native)
        sources(native)  # which take a moment; tests/kernels compile the kernels themselves
        completed(python, "-m", "rekindle.compute.cpu.kernels.build", cwd=tmp_path)
        assert run(python, "-c", KERNELS, *runnable(), cwd=tmp_path).split() == runnable()


@needs_kernels
def test_kernels_of_the_wheel_are_loaded_where_no_compiler_is(wheel: Path, tmp_path: Path) -> None:
    python, site = environment(tmp_path / "env")
    for path in (*SITE.glob("numpy*"), SITE / "torch"):
        (site / path.name).symlink_to(path)
    install(python, wheel)
    assert run(python, "-c", KERNELS, *runnable(), cwd=tmp_path).split() == runnable()


def test_without_extras_the_cache_needs_numpy_alone(bare_wheel: Path, tmp_path: Path) -> None:
    python, site = environment(tmp_path / "env")
    for path in SITE.glob("numpy*"):
        (site / path.name).symlink_to(path)
    install(python, bare_wheel)
    assert run(python, "-c", CACHE, cwd=tmp_path) == "ok\n"
    assert "pip install rekindle-pocket" in run(python, "-c", WITHOUT_MODEL, cwd=tmp_path)
