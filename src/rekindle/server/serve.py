"""A server of one model: its banner, and how it runs until a signal; then its caller flushes and closes the engine."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from contextlib import closing

from rekindle.config import Settings, show_bytes
from rekindle.engine.api import Engine
from rekindle.model.checkpoint import Source
from rekindle.pocket import ABOUT, is_pocket
from rekindle.server.app import create_app
from rekindle.server.handover import Handover
from rekindle.server.running import run_application
from rekindle.spec import ModelFacts
from rekindle.store.files.shards import SHARD_BYTES

INDENT = " " * 11
IN_BITS = {"int8": "8 bits", "int4": "4 bits", "bfloat16": "16 bits (bf16)", "float32": "32 bits (fp32)"}
MANY_BYTES = re.compile(r"\b(\d{1,3}(?:,\d{3}){2,})(?: bytes\b|(?=$|[;,]))")  # not of tokens


def banner(engine: Engine, settings: Settings, url: str) -> str:
    """Describe the model, its weights, KV formats and why, memory, warm agents, and the URL with a first request."""
    spec, stats = engine.spec, engine.stats()
    name = settings.server.served_model_name or spec.name
    place = engine.settings.store
    store = str(place.own_directory()) if place.enabled else "off: nothing survives a restart"
    source = Source.find(settings.model.model, settings.model.revision)
    about = ABOUT if is_pocket(source.directory) else ""
    if settings.backend.address is None:
        computing = [
            f"weights    {_weights(spec.facts)}",
            f"KV         {spec.layout.describe()}",
            *(f"{INDENT}{_readable(note)}" for note in engine.notes),
        ]
    else:
        notes = "; ".join(engine.notes)
        computing = textwrap.wrap(notes, 100, initial_indent="backend    ", subsequent_indent=INDENT)
    tokens = f"{stats.num_blocks * spec.layout.block_tokens:,} tokens"
    hot = [f"hot        {tokens} in {stats.hot_bytes / 2**20:,.0f} MiB"] if engine.has_kv else []
    kept = "warm " if engine.has_kv else "texts"
    memory = [*hot, f"{kept}      agents found: {engine.num_warm_agents:,}, in {store}"]
    lines = [
        f"model      {name} ({spec.architecture}){_parameters(spec.facts)}, context {engine.max_context:,} tokens",
        *textwrap.wrap(about, 100, initial_indent=INDENT, subsequent_indent=INDENT),
        *computing,
        *memory,
        f"ready      {url}/v1   (OpenAI base URL)",
        *_first_request(url, takes_messages=engine.encoder.template.exists),
        f"           curl {url}/v1/agents",
    ]
    return "\n".join(lines)


def _parameters(facts: ModelFacts) -> str:
    """How many there are, where that is known: of a front's model it is not."""
    if not facts.num_parameters:
        return ""
    unit, name = (1e9, "billion") if facts.num_parameters >= 1e9 else (1e6, "million")
    count = facts.num_parameters / unit
    return f", {count:,.{0 if count >= 10 else 1}f} {name} parameters"


def _weights(facts: ModelFacts) -> str:
    """Their format, and what they take in memory and on disk."""
    kept = IN_BITS.get(facts.weight_format, facts.weight_format)
    files = "a GGUF file" if facts.file_format == "gguf" else "safetensors"
    return f"{kept}, {show_bytes(facts.weight_bytes)} in memory, from {files} of {show_bytes(facts.file_bytes)}"


def _readable(note: str) -> str:
    """A note with its large sizes in MiB or GiB."""
    return MANY_BYTES.sub(lambda found: show_bytes(int(found[1].replace(",", ""))), note)


def _first_request(url: str, *, takes_messages: bool) -> list[str]:
    """A request to copy: a message, or the beginning of a text for a model that has no chat template."""
    if takes_messages:
        path, body = "/v1/chat/completions", '{"messages":[{"role":"user","content":"Hello!"}]}'
    else:
        path, body = "/v1/completions", '{"prompt":"Once upon a time","max_tokens":40}'
    return [f"           curl {url}{path} -H 'X-Agent-ID: me' \\", f"             -d '{body}'"]


def _store_files(engine: Engine) -> int:
    """Return how many block files the store may open."""
    store = engine.stats().store
    return 0 if store is None else store["disk_bytes"] // SHARD_BYTES + len(engine.spec.layout.parts)


def run_server(engine: Engine, settings: Settings, say: Callable[[str], None], *, handover: Handover) -> int | None:
    """Serve a started engine until a signal, and return it; None as in `run_application`.

    `say` gets the banner once requests are answered. Closes the listeners of `handover`.
    """
    return run_application(
        lambda server: closing(create_app(engine, server, model=settings.model.model)),
        settings.server,
        lambda url: say(banner(engine, settings, url)),
        handover=handover,
        slot=engine.settings.store.slot,
        store_files=_store_files(engine),
    )
