"""The families of models, as `rekindle models` prints them."""

from __future__ import annotations

from rekindle.cli.families import HEAD, cells
from rekindle.model.families import FAMILIES
from tools.reference.page import table


def models() -> str:
    """Return the table."""
    return table(HEAD, map(cells, FAMILIES))
