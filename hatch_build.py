"""The build hook of the package: a wheel takes the kernels along that can be compiled here.

With libraries in it a wheel is for this platform, but for every Python (`py3-none-manylinux_2_17_x86_64`), as they know
nothing of Python. Without a compiler it is what it would be without this hook, `py3-none-any`. An editable install
compiles in place. Nothing here fails an install: what is missing is printed, and everything works without kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface[Any]):
    """Compiles the kernels before a wheel is written."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, print what came of it, and add the libraries, which git ignores; an editable wheel ignores that."""
        sys.path.insert(0, str(Path(self.root, "src")))  # not what may be installed already
        from rekindle.compute.cpu.kernels import build

        built = build.build()
        for line in build.report(built):
            self.app.display_info(line)
        libraries = [each.path for each in built if each.path is not None]
        if libraries:
            build_data["artifacts"] += [f"/{path.relative_to(self.root).as_posix()}" for path in libraries]
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{build.wheel_platform(libraries)}"
