"""The command line. This module and `border` need nothing but Python, so they can name missing packages.

`main` imports the rest, so that ctrl-C during imports ends the command as it does later.
"""

from __future__ import annotations

import gc
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
    except KeyboardInterrupt:  # while `border` was being imported, or a second one while it ended
        sys.stderr.write("rekindle: interrupted\n")
    finally:
        # Python kills itself with SIGINT at exit if ctrl-C came during an exec of source, as dataclasses do on import;
        # a later successful exec resets that.
        exec("")
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the exit code is final
    sys.exit(code)


def _code() -> int:
    from rekindle.cli.border import code_of, flush_output

    def run() -> int:
        gc.disable()  # what is imported stays, so it is not searched for garbage
        try:
            from rekindle.compute.cpu.kernels import thread_pool

            thread_pool.bound_spinning()
            from rekindle.cli.commands import app
        finally:
            gc.freeze()
            gc.enable()
        try:
            app()
        except SystemExit as end:  # typer turns a ctrl-C outside of commands into one, silently
            if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise
        return 0

    try:
        return code_of(run)
    finally:
        flush_output()
