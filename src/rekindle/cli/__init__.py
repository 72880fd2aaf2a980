"""The command line. This module and `border` need nothing but Python, so they can say what is not installed.

`main` imports all the rest, so that ctrl-C while that goes on ends as it does later.
"""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rekindle.cli.commands import app as app


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rekindle.cli.commands import app

    return app


def main() -> None:
    """Entry point of the `rekindle` command."""
    code = 130
    try:
        code = _code()
    except KeyboardInterrupt:  # while the border itself was imported, or once more while it ended
        sys.stderr.write("rekindle: interrupted\n")
    finally:
        # Python kills itself with SIGINT at its end where ctrl-C came in the middle of an exec of source, as
        # dataclasses do on import; a later exec that succeeds takes that back.
        exec("")
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: the code stands
    sys.exit(code)


def _code() -> int:
    from rekindle.cli.border import code_of, flush_output

    def run() -> int:
        from rekindle.cli.commands import app

        try:
            app()
        except SystemExit as end:  # typer makes one of a ctrl-C outside of commands, and says nothing
            if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise
        return 0

    try:
        return code_of(run)
    finally:
        flush_output()
