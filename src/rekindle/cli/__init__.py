"""The command line. This module and `border` need nothing but Python, so they can say what is not installed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rekindle.cli.border import code_of, flush_output

if TYPE_CHECKING:
    from rekindle.cli.commands import app as app


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rekindle.cli.commands import app

    return app


def main() -> None:
    """Entry point of the `rekindle` command."""

    def run() -> int:
        from rekindle.cli.commands import app

        app()
        return 0

    try:
        code = code_of(run)
    finally:
        flush_output()
    sys.exit(code)
