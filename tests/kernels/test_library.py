"""Loading: the fastest library that the processor runs, and the reason where it is another or none."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.compute.cpu.kernels import build
from rekindle.compute.cpu.kernels.levels import LEVELS, library_name
from rekindle.compute.cpu.kernels.library import INTERFACE, KernelChoice, instructions, load
from rekindle.errors import ConfigError
from tests.kernels.native import needs_kernels, runnable, sources

# In a process of its own, as torch is imported in it, and first the library.
ONE_POOL = """
import ctypes, pathlib, sys
from rekindle.compute.cpu.kernels.library import load
library = load(sys.argv[2], directory=pathlib.Path(sys.argv[1])).library
assert "torch" not in sys.modules
assert library.function("rk_count_threads", [ctypes.c_int32], ctypes.c_int32)(3) == 3
import torch
torch.ones(1000, 1000).sum()
names = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line and ".so" in line}
print(*[name for name in names if "gomp" in name or "iomp" in name], sep="\\n")
"""


def cpuinfo(directory: Path, *flags: str) -> Path:
    """A file as Linux writes it, of two cores with these instructions."""
    path = directory / "cpuinfo"
    core = f"processor\t: 0\nmodel name\t: a: b\nflags\t\t: fpu sse2 {' '.join(flags)}\nbugs\t\t: none\n\n"
    path.write_text(core * 2)
    return path


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("libraries")
    build.build(directory, sources(directory / "native", tiles=True))
    return directory


def test_the_number_of_the_interface_is_that_of_the_header() -> None:
    found = re.findall(r"#define RK_INTERFACE (\d+)", (build.NATIVE / "rekindle.h").read_text())
    assert found == [str(INTERFACE)]


@needs_kernels
def test_each_level_that_the_processor_runs_is_loaded_and_called(libraries: Path) -> None:
    assert runnable()
    digests = set()
    for level in runnable():
        found = load(level, directory=libraries)
        assert found.library is not None and (found.level, found.why_not) == (level, "")
        assert found.library.function("rk_interface", [], ctypes.c_int32)() == INTERFACE
        assert found.library.function("rk_count_threads", [ctypes.c_int32], ctypes.c_int32)(4) == 4
        with pytest.raises(AttributeError):
            found.library.function("rk_undeclared", [])
        with pytest.raises(ctypes.ArgumentError):
            found.library.function("rk_count_threads", [ctypes.c_int32], ctypes.c_int32)("4")
        digests.add(found.library.digest)
    assert len(digests) == len(runnable())
    assert load("auto", directory=libraries).level == runnable()[0]
    assert load("torch", directory=libraries) == KernelChoice(None)


@needs_kernels
def test_tiles_have_the_whole_shape_that_they_are_given(libraries: Path) -> None:
    for level in runnable():
        library = load(level, directory=libraries).library
        assert library is not None
        taken = ctypes.create_string_buffer(64)
        library.function("rk_tiles", [ctypes.c_void_p])(taken)
        wanted = bytes([1, *[0] * 15]) + b"\x30\0" * 8 + bytes(16) + b"\5" * 8 + bytes(8)
        assert taken.raw == (wanted if "amx" in level else bytes(64))


@needs_kernels
def test_one_pool_of_threads_with_torch(libraries: Path) -> None:
    command = [sys.executable, "-c", ONE_POOL, str(libraries), runnable()[-1]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (one,) = done.stdout.split()
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    site = Path(spec.origin).parents[1]
    brought = [path.resolve() for folder in ("torch/lib", "torch.libs") for path in (site / folder).glob("libgomp*")]
    assert not brought or Path(one).resolve() in brought


@needs_kernels
def test_instructions_that_the_processor_lacks_are_named(libraries: Path, tmp_path: Path) -> None:
    older = cpuinfo(tmp_path, *LEVELS["avx2"], "avx512f", "avx512bw", "avx512dq", "avx512vl")
    found = load("auto", directory=libraries, cpuinfo=older)
    assert (found.level, found.why_not) == ("avx2", "")  # nothing is missing that could be had
    with pytest.raises(ConfigError, match=r"^kernels=avx512: this processor has no avx512_bf16, avx512_vnni"):
        load("avx512", directory=libraries, cpuinfo=older)
    oldest = cpuinfo(tmp_path, "avx2", "fma")
    assert load("auto", directory=libraries, cpuinfo=oldest) == KernelChoice(
        None, "this processor has no f16c, pclmulqdq"
    )
    nothing = load("auto", directory=libraries, cpuinfo=tmp_path / "no such file")
    assert nothing.library is None and "avx2, fma, f16c" in nothing.why_not


@needs_kernels
def test_a_library_that_is_not_there_leaves_the_next_and_its_reason(libraries: Path, tmp_path: Path) -> None:
    every = cpuinfo(tmp_path, *LEVELS["avx512"])
    (tmp_path / "librekindle-avx2.so").write_bytes((libraries / "librekindle-avx2.so").read_bytes())
    found = load("auto", directory=tmp_path, cpuinfo=every)
    assert found.level == "avx2" and "avx512 are not built" in found.why_not and "g++" in found.advice
    (tmp_path / "librekindle-avx2.so").unlink()
    found = load("auto", directory=tmp_path, cpuinfo=every)
    assert found.level == "torch" and "avx512 are not built" in found.why_not
    with pytest.raises(ConfigError, match=r"avx2 are not built: install g\+\+, then run python -m rekindle"):
        load("avx2", directory=tmp_path, cpuinfo=every)


@needs_kernels
@pytest.mark.parametrize("interface", [0, INTERFACE + 1])
def test_another_interface_is_not_used(tmp_path: Path, interface: int) -> None:
    build.build(tmp_path, sources(tmp_path / "native", interface=interface))
    found = load("auto", directory=tmp_path)
    assert found.library is None and f"has interface {interface} instead of {INTERFACE}" in found.why_not
    with pytest.raises(ConfigError, match=r"has interface .*: run python -m rekindle\.compute\.cpu\.kernels\.build"):
        load(runnable()[0], directory=tmp_path)


def test_a_damaged_file_is_not_used(tmp_path: Path) -> None:
    for level in LEVELS:
        (tmp_path / library_name(level)).write_bytes(b"\x7fELF, and no more")
    found = load("auto", directory=tmp_path)
    assert found.library is None and "cannot be loaded" in found.why_not


def test_instructions_are_read_whole(tmp_path: Path) -> None:
    assert instructions(cpuinfo(tmp_path, "avx2")) == {"fpu", "sse2", "avx2"}


@needs_kernels
def test_a_system_that_withholds_registers_leaves_the_next_level(tmp_path: Path) -> None:
    native = sources(tmp_path / "native")
    (native / "interface.cpp").write_text(
        '#include "rekindle.h"\n'
        "int32_t rk_interface(void) { return RK_INTERFACE; }\n"
        "#ifdef __AVX512F__\nint32_t rk_start(void) { return 0; }\n#else\n"
        "int32_t rk_start(void) { return 1; }\n#endif\n"
    )
    build.build(tmp_path, native)
    found = load("auto", directory=tmp_path)
    withheld = {"amx", "avx512"}
    assert found.level == next(level for level in runnable() if level not in withheld)
    if runnable()[0] in withheld:
        assert "does not let this process use the registers" in found.why_not
