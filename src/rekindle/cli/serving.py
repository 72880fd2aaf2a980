"""serve, chat, demo."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Annotated

import typer

from rekindle.cli.border import INTERRUPTED, interrupts
from rekindle.cli.console import console
from rekindle.cli.remote import find_server, naming_the_server
from rekindle.cli.settings import BACKEND_FLAGS, SERVER_FLAGS, with_settings
from rekindle.cli.why import UrlOption
from rekindle.config import ModelsSettings, Settings, show_bytes
from rekindle.errors import ConfigError
from rekindle.extensions import extensions, load

STOPPING = (signal.SIGTERM, signal.SIGINT)
SWITCH_S = 0.0002
DEMO_SERVER = frozenset({"host", "port", "served_model_name", "open"})  # settings passed to the demo's servers


@contextmanager
def lasting_heap() -> Iterator[Callable[[], None]]:
    """Exclude the objects created at start-up from garbage collection; yield what excludes those created until now.

    Modules and weights are some 420,000 permanent objects: full collections of them take 0.4 s of a start and 0.2 s of
    the first request after it. Imports leave hardly any garbage, 1 MB, so they are frozen without a collection (0.2 s).
    """
    gc.disable()
    try:
        yield gc.freeze
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()


@with_settings()
def serve(settings: Settings) -> int:
    """Serve a model over HTTP until a signal; all conversations are on disk when it stops."""
    from rekindle.server.observers.log import logging_to

    with logging_to(settings.server, sys.stderr):
        if settings.models.path is not None:
            return INTERRUPTED if _several()(settings, typer.echo) == signal.SIGINT else 0
        if settings.models != ModelsSettings():
            raise ConfigError("keep_alive, max_loaded: these are for several models: set models, too")
        try:
            stopped_by, settings = _serve(settings)
        except KeyboardInterrupt:
            typer.echo(
                "rekindle: stopped before the model was loaded: no request was served, nothing is lost", err=True
            )
            return INTERRUPTED
        typer.echo(f"stopped: {_left(settings)}")
    return INTERRUPTED if stopped_by == signal.SIGINT else 0


def _several() -> Callable[[Settings, Callable[[str], None]], int | None]:
    """What serves several models."""
    points = extensions("rekindle.models")
    if not points:
        raise ConfigError("models: several models need the package rekindle-models: pip install 'rekindle[serve]'")
    several: Callable[[Settings, Callable[[str], None]], int | None] = load(points[0])
    return several


def _serve(settings: Settings) -> tuple[int | None, Settings]:
    """Serve until a signal; return its number, and the settings with the slot that was claimed."""
    with ExitStack() as stack:
        with lasting_heap() as freeze, interrupts():
            if settings.backend.address is None:
                typer.echo(_loading(settings))
            from rekindle.engine.api import Engine
            from rekindle.server.descriptors import raise_limit
            from rekindle.server.handover import Handover
            from rekindle.server.recording import check_record
            from rekindle.server.serve import run_server

            raise_limit()
            stack.enter_context(_switching_often())
            settings.server.namespaces()  # a file of keys that cannot be read is said before anything is loaded
            handover = stack.enter_context(closing(Handover.of_process(settings.server)))
            if handover.slot is not None:
                settings = replace(settings, store=replace(settings.store, slot=handover.slot))
            if settings.server.record is not None:
                check_record(settings.server.record)
            stack.enter_context(_signals_as_before())
            freeze()
            engine = stack.enter_context(Engine(settings, before_store=handover.wait))
            stack.callback(_save_undisturbed)
        return run_server(engine, settings, typer.echo, handover=handover), engine.settings


def _loading(settings: Settings) -> str:
    """What is said before anything large is imported: silence for seconds looks like a program that hangs."""
    return f"loading {settings.model.model or 'the bundled model'}"


@contextmanager
def _switching_often() -> Iterator[None]:
    """Shorten Python's switch interval, 5 ms by default.

    A step of the engine takes the interpreter's lock hundreds of times. While another thread runs Python code, such as
    for a request of 30,000 messages, each time waits for that interval.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def _signals_as_before() -> Iterator[None]:
    before = {kind: signal.getsignal(kind) for kind in STOPPING}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _save_undisturbed() -> None:
    """Ignore further signals: a stopping server saves first, which takes bounded time."""
    for kind in STOPPING:
        signal.signal(kind, lambda *_: None)


def _left(settings: Settings) -> str:
    """What a stopped server has saved on disk."""
    from rekindle.store import admin

    if not settings.store.enabled or settings.cache.reuse == "off":
        return "nothing is kept without a store"
    directory = settings.store.own_directory()
    stores = admin.list_stores(directory)
    agents = sum(store.num_agents for store in stores)
    return f"{agents:,} agents and {show_bytes(sum(store.bytes for store in stores))} are saved in {directory}"


@with_settings(unused=SERVER_FLAGS)
def chat(
    settings: Settings,
    flags: frozenset[str],
    agent: Annotated[str, typer.Option("--agent", help="whose memory to use")] = "me",
    url: UrlOption = None,
) -> int:
    """Talk to the running server that has the store, else to the model here; /quit or the end of input ends it."""
    from rekindle.cli.chat import EngineTalker, RemoteTalker, chat_loop

    held = find_server(settings, flags, url)
    if held is not None:
        chat_loop(RemoteTalker(held.server, held.model, agent), console())
        return 0
    screen = console()
    if screen.is_terminal:
        typer.echo(_loading(settings))
    from rekindle.engine.api import Engine

    with naming_the_server(), Engine(settings) as engine:
        chat_loop(EngineTalker(engine, agent), screen)
    return 0


@with_settings(unused=SERVER_FLAGS - DEMO_SERVER | BACKEND_FLAGS, defaults={"port": 0})
def demo(
    settings: Settings,
    seed: Annotated[int, typer.Option("--seed", help="of the facts given to the agents")] = 7,
) -> int:
    """Four agents, a kill -9 between their turns, and a verdict: 0 if every reply and 90 % of the memory survived."""
    from rekindle.demo.run import run_demo

    return run_demo(settings, seed=seed, console=console())
