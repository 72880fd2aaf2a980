"""`rekindle ps`, `list`, `stop` and `pull`: models that are loaded, that are here, to be left, to be fetched."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer

from rekindle import pocket
from rekindle.cli.console import show_duration, show_table
from rekindle.cli.remote import FINDING_S, Remote, Unreachable
from rekindle.cli.settings import GroupedCommand, with_settings
from rekindle.cli.why import JsonOption, UrlOption
from rekindle.config import Settings, show_bytes
from rekindle.errors import ConfigError
from rekindle.model.checkpoint import Source, weight_files
from rekindle.model.gguf import is_gguf
from rekindle.model.short_names import SHORT_NAMES
from rekindle.server.ollama.models import FOREVER

LABEL = re.compile(r"[-.]((?:I?Q\d|T?Q\d|MXFP4|BF16|F16|F32)\w*)$", re.IGNORECASE)  # what GGUF files are named by
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="of a model")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for name, command in (("ps", ps), ("list", list_models), ("stop", stop), ("pull", pull)):
        app.command(name, cls=GroupedCommand)(command)


@with_settings(only=())
def ps(settings: Settings, url: UrlOption = None, as_json: JsonOption = False) -> int:
    """Show the models that the running server has loaded, what they take, and until when they stay."""
    remote = Remote.of(settings.server, url)
    found = remote.ask("GET", "/api/ps")["models"]
    if as_json:
        typer.echo(json.dumps(found))
    elif not found:
        typer.echo(f"no model is loaded at {remote.url}", err=True)
    else:
        head = ("NAME", "SIZE", "DEVICE", "CONTEXT", "UNTIL")
        typer.echo(show_table(head, [_loaded(entry, time.time()) for entry in found]))
    return 0


def _loaded(entry: Mapping[str, Any], now: float) -> tuple[str, ...]:
    device = "GPU" if entry["size_vram"] else "CPU"
    name = str(entry["name"]).removesuffix(":latest")
    return name, show_bytes(entry["size"]), device, f"{entry['context_length']:,}", _until(entry["expires_at"], now)


def _until(expires_at: str, now: float) -> str:
    if expires_at == FOREVER:
        return "the server ends"
    return f"in {show_duration(datetime.fromisoformat(expires_at).timestamp() - now)}"


@dataclass(frozen=True, slots=True)
class _Here:
    """A model on this machine: what `rekindle serve` calls it, its bytes, where it is, what the running server does
    with it."""

    name: str
    size: int | None
    place: str


@with_settings(only=())
def list_models(settings: Settings, url: UrlOption = None, as_json: JsonOption = False) -> int:
    """List the models on this machine: those of the running server, in the hub's cache, and with short names."""
    found = [*_served(Remote.of(settings.server, url, timeout_s=FINDING_S), is_named=url is not None)]
    found += [*_with_short_names(), *_in_hub_cache()]
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found]))
        return 0
    rows = [(each.name, "" if each.size is None else show_bytes(each.size), each.place) for each in found]
    typer.echo(show_table(("NAME", "SIZE", "WHERE"), rows))
    return 0


def _served(remote: Remote, *, is_named: bool) -> Iterator[_Here]:
    """The models of the running server; none if there is none, unless it was named."""
    try:
        tags = {entry["name"]: entry["size"] for entry in remote.ask("GET", "/api/tags")["models"]}
        loaded = {entry["name"] for entry in remote.ask("GET", "/api/ps")["models"]}
    except Unreachable:
        if is_named:
            raise
        return
    for name, size in tags.items():
        state = "loaded" if name in loaded else "not loaded"
        yield _Here(name.removesuffix(":latest"), size or None, f"{remote.url}, {state}")


def _with_short_names() -> Iterator[_Here]:
    yield _Here(pocket.NAME, sum(file.stat().st_size for file in weight_files(pocket.model_dir())), "bundled")
    for name, short in SHORT_NAMES.items():
        if (file := short.installed()) is not None:
            yield _Here(name, file.stat().st_size, f"the package {short.distribution}")


def _in_hub_cache() -> Iterator[_Here]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with suppress(CacheNotFound):
        for repo in sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id):
            if repo.repo_type != "model":
                continue
            files = {file.file_name: file.size_on_disk for each in repo.revisions for file in each.files}
            weights = {name: size for name, size in files.items() if name.endswith(".safetensors")}
            if weights:
                yield _Here(repo.repo_id, sum(weights.values()), "hub cache")
            for name, size in sorted(files.items()):
                if is_gguf(repo.repo_path / name):
                    yield _Here(f"{repo.repo_id}:{label_of(name)}", size, "hub cache")


def label_of(file_name: str) -> str:
    """Return what names a GGUF file in its repository: its type where its name ends in one, else its whole name."""
    stem = file_name.rpartition("/")[2][: -len(".gguf")]
    found = LABEL.search(stem)
    return stem if found is None else found[1]


@with_settings(only=())
def stop(settings: Settings, name: NameArgument, url: UrlOption = None) -> int:
    """End a model of the running server once it has no request; it saves what it has, and is loaded when asked for."""
    remote = Remote.of(settings.server, url)
    path = f"/v1/models/{quote(name, safe='')}"
    state = remote.ask("GET", path)["rekindle"]
    if "loaded" not in state:
        raise ConfigError(
            f"the server at {remote.url} has one model, for as long as it runs: end it by a signal (ctrl-C)"
        )
    if not state["loaded"]:
        typer.echo(f"{name} is not loaded")
        return 0
    remote.ask("POST", "/api/generate", {"model": name, "keep_alive": 0})
    if remote.ask("GET", path)["rekindle"]["loaded"]:
        typer.echo(f"{name} has requests: it is left when they are answered")
    else:
        typer.echo(f"{name} was left; what it had is saved")
    return 0


@with_settings(only=("revision",))
def pull(settings: Settings, name: NameArgument) -> int:
    """Fetch a model from the hub: a short name, OWNER/NAME, or OWNER/NAME:LABEL for one of its GGUF files."""
    source = Source.find(name, settings.model.revision)
    if source.directory is None and source.file is None:
        files = weight_files(source.fetch())
        size = sum(file.stat().st_size for file in files)
        typer.echo(f"{name}: {show_bytes(size)} in {files[0].parent}; rekindle serve {name}")
    else:
        typer.echo(f"{name} is here: {source.directory or source.file}; rekindle serve {name}")
    return 0
