"""`rekindle models`: which families of models are served, with which KV and at which promise."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from rekindle.cli.console import console
from rekindle.model.families import FAMILIES, Family
from rekindle.parts import WindowPart

HEAD = ("family", "notes", "served", "promise", "on a card", "KV bytes a token", "and", "of all layers in 16 bits")


def models(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, an object for each family")] = False,
) -> None:
    """List the families of models: served or not, KV in bytes a token, the promise for the same prompt."""
    if as_json:
        typer.echo(json.dumps([described(family) for family in FAMILIES], indent=2))
        return
    shown = Table(title="Families of models", title_justify="left")
    for name in HEAD:
        shown.add_column(name, justify="right" if name in HEAD[5:6] + HEAD[7:] else "left")
    for family in FAMILIES:
        shown.add_row(*cells(family))
    console().print(shown)


def cells(family: Family) -> tuple[str, ...]:
    """Return a row of the table: the texts under `HEAD`."""
    served = {"yes": "yes", "text": "yes, for text", "no": "no"}[family.served]
    kv, more, plain = _sizes(family)
    return family.name, family.about, served, family.promise, family.on_card, kv, more, plain


def _sizes(family: Family) -> tuple[str, str, str]:
    """Return bytes of KV a token, what comes in addition, and bytes in 16 bits, of the family's example."""
    figures = described(family)["example"]
    if figures is None:
        return "", "", ""
    more = [f"{size:,.0f} in the last {int(window):,}" for window, size in figures["window_bytes_per_token"].items()]
    if figures["snapshot_bytes"] is not None:
        more.append(f"{figures['snapshot_bytes'] / 1e6:,.1f} MB a snapshot")
    kv = f"{figures['kv_bytes_per_token']:,.0f} ({figures['name']})"
    return kv, "; ".join(more), f"{figures['kv_bytes_per_token_16bit']:,}"


def described(family: Family) -> dict[str, Any]:
    """Return a family as JSON, with the bytes of its example."""
    found = {**asdict(family), "example": None}
    if family.example is not None:
        layout = family.example.layout
        found["example"] = {
            "name": family.example.name,
            "kv_bytes_per_token": layout.parts[0].payload_bytes / layout.block_tokens,
            "window_bytes_per_token": {
                str(kind.window): layout.parts[index].payload_bytes / layout.block_tokens
                for index, kind in layout.ending.items()
                if isinstance(kind, WindowPart)
            },
            "kv_bytes_per_token_16bit": layout.token_bytes_16bit,
            "snapshot_bytes": None if layout.state_part is None else layout.state_part.payload_bytes,
            "bytes_at_32768_tokens": layout.kept_bytes(32768),
        }
    return found
