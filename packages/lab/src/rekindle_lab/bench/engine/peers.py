"""Peers of `rekindle bench engine --against`: their names, the weights they take, the packages they need.

--against openvino,llama.cpp               16-bit weights
--against openvino:q8_0,llama.cpp:q8_0     8-bit ones; both of a peer may be named
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from rekindle.errors import ConfigError
from rekindle_lab.bench.engine.gguf_file import GgufType


@dataclass(frozen=True, slots=True)
class Kind:
    """One engine: the module it is imported as, its name on PyPI, and its weights, the usual ones first."""

    module: str
    package: str
    weights: tuple[GgufType, ...]


KINDS: Mapping[str, Kind] = {
    "openvino": Kind("openvino_genai", "openvino-genai", ("f16", "q8_0")),  # its reader of GGUF takes no bf16
    "llama.cpp": Kind("llama_cpp", "llama-cpp-python", ("f16", "bf16", "q8_0")),
}


@dataclass(frozen=True, slots=True)
class Peer:
    """One further arm."""

    name: str
    weights: GgufType

    @property
    def arm(self) -> str:
        """The name of its column."""
        return self.name if self.weights == KINDS[self.name].weights[0] else f"{self.name}:{self.weights}"


def peers_of(text: str) -> tuple[Peer, ...]:
    """Return the peers of a list such as "openvino,llama.cpp:q8_0", none for ""; ConfigError for what is no peer."""
    found = tuple(_peer(item.strip()) for item in text.split(",")) if text.strip() else ()
    if len(set(found)) < len(found):
        raise ConfigError(f"--against names a peer twice: {text}")
    return found


def _peer(text: str) -> Peer:
    name, _, wanted = text.partition(":")
    if name not in KINDS:
        raise ConfigError(f"--against takes {' and '.join(KINDS)}, separated by commas, not {text!r}")
    known = KINDS[name].weights
    for weights in known:
        if weights == (wanted or known[0]):
            return Peer(name, weights)
    raise ConfigError(f"--against {name} takes {', '.join(known)} weights ({name}:{known[-1]}), not {wanted!r}")


def need_packages(peers: tuple[Peer, ...], find: Callable[[str], object | None] = find_spec) -> None:
    """Raise ConfigError with the command that installs what is missing."""
    missing = {KINDS[peer.name].package: peer.name for peer in peers if find(KINDS[peer.name].module) is None}
    if missing:
        named = " and ".join(missing.values())
        raise ConfigError(f"--against {named} needs packages that are not installed: pip install {' '.join(missing)}")
