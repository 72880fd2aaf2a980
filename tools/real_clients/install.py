"""Install client programs from npm and PyPI, each into a directory of its own; the version that came."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

INSTALL_S = 1200.0
_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


class NotInstalled(Exception):
    """A client that a registry did not deliver, with the reason."""


@dataclass(frozen=True, slots=True)
class Packages:
    """What a client is installed from; the first of them names its version."""

    registry: Literal["npm", "pypi"]
    names: tuple[str, ...]

    def install(self, directory: Path) -> str:
        """Install what is not there yet and return the version; NotInstalled with the end of what was printed."""
        directory.mkdir(parents=True, exist_ok=True)
        done = directory / "installed.json"
        if not done.exists() or json.loads(done.read_text("utf-8")) != list(self.names):
            for command in self._commands(directory):
                _run(command)
            done.write_text(json.dumps(list(self.names)), "utf-8")
        return self._version(directory)

    def _commands(self, directory: Path) -> Sequence[Sequence[str]]:
        if self.registry == "npm":
            return [["npm", "install", "--prefix", str(directory), "--no-fund", "--no-audit", *self.names]]
        python = str(directory / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        return [[sys.executable, "-m", "venv", str(directory)], [*pip, *self.names]]

    def _version(self, directory: Path) -> str:
        name = self.names[0]
        if self.registry == "npm":
            package = name[: name.index("@", 1)] if "@" in name[1:] else name
            described = directory / "node_modules" / package / "package.json"
            return str(json.loads(described.read_text("utf-8"))["version"])
        bare = name.split("==")[0].split("[")[0]
        return _run([str(directory / "bin" / "python"), "-c", _VERSION, bare]).strip()

    def bin(self, directory: Path) -> Path:
        """Return where its commands are."""
        return directory / "node_modules" / ".bin" if self.registry == "npm" else directory / "bin"


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, env=_environment())
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{command[0]}: {error}") from error
    if done.returncode:
        raise NotInstalled((done.stderr or done.stdout).strip()[-600:])
    return done.stdout


def _environment() -> dict[str, str]:
    """Return the caller's environment without its virtual environment."""
    return {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
