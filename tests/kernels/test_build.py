"""Compiling: every level with the real compiler, nothing twice, and one line where something is missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.compute.cpu.kernels import build
from rekindle.compute.cpu.kernels.levels import HERE, LEVELS
from tests.kernels.native import needs_kernels, script, sources

NEWEST_GLIBC = 28  # 2.28, of 2018: what the systems have on which torch is installed


@needs_kernels
def test_every_level_is_compiled_without_a_warning_and_stands_alone(tmp_path: Path) -> None:
    """Small sources here; of the kernels the libraries that `make kernels` made, which .ci/run does with -Werror."""
    kernels, small = build.build(), build.build(tmp_path, sources(tmp_path / "native", tiles=True))
    for built in (kernels, small):
        assert [(each.level, each.output) for each in built] == [(level, "") for level in LEVELS]
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "native", *(each.path for each in small if each.path)])
    assert all(each.said.startswith("compiled by ") for each in small)
    for each in (*kernels, *small):
        assert each.path is not None
        data = each.path.read_bytes()
        assert b"rk_interface" in data
        assert not [name for name in (b"libgomp.so", b"libstdc++.so", b"libgcc_s.so", b"__kmpc_") if name in data]
    platform_tag = build.wheel_platform([each.path for each in kernels if each.path is not None])
    assert platform_tag.startswith("linux") or int(platform_tag.split("_")[2]) <= NEWEST_GLIBC, platform_tag


@needs_kernels
def test_only_what_changed_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = sources(tmp_path / "native")

    def said() -> set[str]:
        return {each.said.split()[0] for each in build.build(tmp_path, native)}

    assert [said(), said()] == [{"compiled"}, {"is"}]
    (native / "threads.cpp").write_text((native / "threads.cpp").read_text() + "// a line\n")
    assert [said(), said()] == [{"compiled"}, {"is"}]
    (native / "extra.hpp").touch()
    assert [said(), said()] == [{"compiled"}, {"is"}]
    other = script(tmp_path / "other", 'test "$1" = --version && echo another 1.0 || exec g++ "$@"')
    monkeypatch.setenv("CXX", str(other))
    assert [said(), said()] == [{"compiled"}, {"is"}]


@needs_kernels
def test_without_a_compiler_a_current_library_stays_and_another_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = sources(tmp_path / "native")
    built = build.build(tmp_path, native)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [each.said for each in build.build(tmp_path, native)] == ["is current"] * len(LEVELS)
    (native / "threads.cpp").unlink()
    for each in build.build(tmp_path, native):
        assert each.path is None and "install g++" in each.said
    assert not [each for each in built if each.path is not None and each.path.exists()]


@needs_kernels
def test_a_level_that_the_compiler_refuses_does_not_hinder_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    old = script(
        tmp_path / "old",
        'case "$*" in *-mavx512bf16* | *-mavxvnni*) echo "old: error: unrecognized option" >&2; exit 1;; esac',
        f'exec {compiler} "$@"',
    )
    monkeypatch.setenv("CXX", str(old))
    native = sources(tmp_path / "native")
    *refused, built = build.build(tmp_path, native)
    assert {(each.path, each.said) for each in refused} == {(None, "old: error: unrecognized option")}
    assert built.path == tmp_path / "librekindle-avx2.so" and built.path.exists()
    kept, line = build.report([*refused, built])
    assert kept.startswith("kernels for avx2: ")
    assert line.startswith("no kernels for amx and avx512 and avxvnni: old: error: ")
    (native / "threads.cpp").write_text("this is no C++")
    wrong = build.build(tmp_path, native)[-1]
    assert wrong.path is None and "threads.cpp:1:1: error" in wrong.said and wrong.said in wrong.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native", "old"]


def test_a_command_that_is_no_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command, why in (("no-such-compiler -O", "No such file or directory"), ("false", "false ended with status 1")):
        monkeypatch.setenv("CXX", command)
        assert {each.said.partition(": ")[0] for each in build.build(tmp_path)} == {f"{command} is no C++ compiler"}
        assert all(why in each.said for each in build.build(tmp_path))


def test_it_needs_no_package_and_ends_well_with_nothing_to_compile_with(tmp_path: Path) -> None:
    package = HERE.parents[2]
    ignored = shutil.ignore_patterns("librekindle-*", "__pycache__")
    shutil.copytree(package / "compute", tmp_path / "rekindle" / "compute", ignore=ignored)
    shutil.copy(package / "__init__.py", tmp_path / "rekindle")
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(tmp_path), "CXX": ""}
    command = [sys.executable, "-S", "-m", "rekindle.compute.cpu.kernels.build"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("no kernels for amx and avx512 and avxvnni and avx2: ")
    assert "everything works without them" in done.stdout


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the tag is that of another libc")
def test_a_wheel_is_for_the_oldest_system_that_has_every_symbol(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.14\0")
    new.write_bytes(b"\0GLIBC_2.4\0GLIBC_2.27\0GLIBC_2.9\0")
    assert build.wheel_platform([old]) == "manylinux_2_17_x86_64"
    assert build.wheel_platform([new, old]) == "manylinux_2_27_x86_64"
