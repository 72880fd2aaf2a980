"""Compile the kernels: `native/*.cpp` into `librekindle-<level>.so` next to this file, one library for each level.

Owns the flags of the compiler, and whether a library is current. Every library carries, as its build id, a digest of
the sources and flags it was made from, and one of the compiler. So it is compiled only when one of them changed, and a
library of other sources is removed even if no compiler is there to replace it. What cannot be built is reported in one
line: everything works without kernels, through torch.

Nothing but Python's standard library is imported, as the package's build hook runs this before anything is installed.
`python -m rekindle.compute.cpu.kernels.build` builds in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rekindle.compute.cpu.kernels.levels import HERE, LEVELS, PLATFORM, Level, library_name

NATIVE = HERE / "native"
# Contraction would leave to the compiler which products are rounded; the kernels write fused ones themselves. GOMP_*
# stay undefined: the library is not linked to libgomp but finds the one that torch has loaded, so that there is one
# pool of threads.
COMPILE = (
    *("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off"),
    "-fno-exceptions",
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-ignored-attributes"),
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # gcc 12 warns of its own intrinsics
)
# Without exceptions, and while no source allocates by `new` or std::vector, a library needs nothing of C++ at run time:
# libc and libm of any age are enough. With a std::vector and the static libstdc++ of Debian 12 it needs glibc 2.36.
LINK = ("-shared", "-Wl,--as-needed")
COMPILERS = ("g++", "c++", "clang++")
AT_ONCE = 2
_FLAGS = {"pclmulqdq": "pclmul"}  # the compiler has other names for these
SOURCES_BYTES, COMPILER_BYTES = 16, 4
WITHOUT = "everything works without them, through torch"
OLDEST_GLIBC = (2, 17)


@dataclass(frozen=True, slots=True)
class Built:
    """A level's library, or None, and in one line where it came from or why there is none.

    `output` is all that the compiler printed.
    """

    level: Level
    path: Path | None
    said: str
    output: str = ""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A command that compiles C++, and the first line of its `--version`."""

    command: tuple[str, ...]
    version: str

    def digest(self) -> bytes:
        """What a build id has of it."""
        return hashlib.blake2b(self.version.encode(), digest_size=COMPILER_BYTES).digest()


class BuildError(Exception):
    """Nothing can be compiled here, or this level cannot; says why."""

    def __init__(self, why: str, output: str = "") -> None:
        super().__init__(why)
        self.output = output


def build(directory: Path = HERE, native: Path = NATIVE) -> list[Built]:
    """Bring the library of every level up to date, each independently; never raises for what the machine lacks."""
    try:
        compiler: Compiler | BuildError = find_compiler()
    except BuildError as error:
        compiler = error
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda level: _built(level, directory / library_name(level), native, compiler), LEVELS))


def find_compiler() -> Compiler:
    """Return $CXX, or else the first of the usual compilers; BuildError if there is none, or not on this platform."""
    if sysconfig.get_platform() != PLATFORM:
        raise BuildError(f"there are none for {sysconfig.get_platform()}, only for {PLATFORM}")
    command = shlex.split(os.environ.get("CXX", ""))
    command = command or [name for name in COMPILERS if shutil.which(name)][:1]
    if not command:
        raise BuildError("no C++ compiler on the PATH: install g++, or name one by CXX")
    try:
        return Compiler(tuple(command), _run([*command, "--version"]).stdout.splitlines()[0])
    except (BuildError, IndexError) as error:
        raise BuildError(f"{shlex.join(command)} is no C++ compiler: {error}") from error


def _built(level: Level, path: Path, native: Path, compiler: Compiler | BuildError) -> Built:
    """Keep the library at `path` if it is current, else replace it; if that fails it is removed."""
    build_id = sources_id(level, native) + (compiler.digest() if isinstance(compiler, Compiler) else b"")
    try:
        if path.is_file() and build_id in path.read_bytes():
            return Built(level, path, "is current")
        if isinstance(compiler, BuildError):
            raise compiler
        with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as scratch:
            made, output = _compile(level, native, Path(scratch), build_id, compiler)
            os.replace(made, path)
        return Built(level, path, f"compiled by {compiler.version}", output)
    except (BuildError, OSError) as error:
        with contextlib.suppress(OSError):
            path.unlink()
        return Built(level, None, str(error), getattr(error, "output", ""))


def sources_id(level: Level, native: Path) -> bytes:
    """A digest of what a level is compiled from: every source with its name, and the flags."""
    hasher = hashlib.blake2b(digest_size=SOURCES_BYTES)
    for path in sorted(native.iterdir()):
        hasher.update(f"{path.name}\0".encode() + hashlib.blake2b(path.read_bytes()).digest())
    hasher.update("\0".join((*COMPILE, *level_flags(level), *LINK)).encode())
    return hasher.digest()


def level_flags(level: Level) -> list[str]:
    """The compiler's flags for the instructions of a level."""
    return [f"-m{_FLAGS.get(name, name.replace('_', '-' if name.startswith('amx') else ''))}" for name in LEVELS[level]]


def _compile(level: Level, native: Path, scratch: Path, build_id: bytes, compiler: Compiler) -> tuple[Path, str]:
    """Compile and link in a scratch directory; return the library, and what the compiler printed."""
    objects, output = list[str](), ""
    for source in sorted(native.glob("*.cpp")):
        objects.append(str(scratch / f"{source.stem}.o"))
        flags = [*COMPILE, *level_flags(level), "-c", str(source), "-o", objects[-1]]
        output += _run([*compiler.command, *flags]).stderr
    library = scratch / library_name(level)
    identity = f"-Wl,--build-id=0x{build_id.hex()}"
    output += _run([*compiler.command, *objects, *LINK, identity, "-o", str(library)]).stderr
    if b"__kmpc_" in library.read_bytes():
        raise BuildError(f"the OpenMP of {compiler.version} is LLVM's, and torch's is GNU's: install g++")
    return library, output


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command; BuildError with the first of its lines that says error, if it fails."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=environment)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
        raise BuildError(lines[0] if lines else f"{command[0]} ended with status {done.returncode}", done.stderr)
    return done


def report(found: Sequence[Built]) -> Iterator[str]:
    """One line for each library, and one for each reason why there is none."""
    for each in found:
        if each.path is not None:
            yield f"kernels for {each.level}: {each.path.name} {each.said}"
    for why in dict.fromkeys(each.said for each in found if each.path is None):
        levels = " and ".join(each.level for each in found if each.path is None and each.said == why)
        yield f"no kernels for {levels}: {why}; {WITHOUT}"


def wheel_platform(libraries: Sequence[Path]) -> str:
    """Return the platform tag of a wheel with these libraries.

    What counts is the newest version of a glibc symbol that one of them refers to: older systems cannot load it, all
    others can, however new the glibc of the machine that compiled it. With another libc the wheel is for this system.
    """
    machine = PLATFORM.replace("-", "_")
    if platform.libc_ver()[0] != "glibc":
        return machine
    data = b"".join(path.read_bytes() for path in libraries)
    versions = [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", data)]
    major, minor = max([OLDEST_GLIBC, *versions])
    return machine.replace("linux", f"manylinux_{major}_{minor}")


if __name__ == "__main__":
    results = build()
    sys.stderr.writelines(dict.fromkeys(each.output for each in results))
    for line in report(results):
        print(line)
