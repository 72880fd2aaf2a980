"""What other distributions add, found by entry points, so that nothing here imports them.

    rekindle.commands    function of the command line's `typer.Typer`: adds commands
    rekindle.server      function of a `server.extension.Context`: returns an `Extension` with its routes
    rekindle.front       function of `Settings`, a `clock` and `before_store` (see `Engine`): returns the `Components`
                         of an engine for which another server computes
    rekindle.models      function of `Settings` and of what takes the banner: serves several models until a signal, and
                         returns its number
    rekindle.cards       function of a `torch.device`: returns what computes on this card by kernels of its own, a
                         `compute.devices.PackingCompute`, or the reason why it cannot
    rekindle.tier        function of an `engine.intake.object_tier.Replica`: opens its object tier, and returns what
                         saves to it and what imports from it
    rekindle.forget      function of a file of sessions, a namespace and an agent: deletes what is kept of it there

A distribution of another version fails when its entry point is loaded, with a ConfigError that names it.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from rekindle.errors import ConfigError

Group = Literal[
    "rekindle.cards",
    "rekindle.commands",
    "rekindle.forget",
    "rekindle.front",
    "rekindle.models",
    "rekindle.server",
    "rekindle.tier",
]


def extensions(group: Group) -> list[EntryPoint]:
    """The entry points of a group, in order of their names."""
    return sorted(entry_points(group=group), key=lambda point: point.name)


def load(point: EntryPoint) -> Any:
    """Import what an entry point names; ConfigError if its distribution does not fit this version."""
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        found = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        raise ConfigError(
            f"{found} does not fit this version of Rekindle: install both in one version ({error})"
        ) from error
