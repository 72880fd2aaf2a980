"""The outermost border of the command line: every error becomes one line and an exit code, never a traceback.

    0    done            2    for the caller to change: a setting, a request, a model, a directory, a missing package
    1    it failed       3    the port is taken, by another program
                         4    the model has to be fetched, and the hub cannot be reached
                         130  ctrl-C        141  the reader of the output is gone

`REKINDLE_DEBUG=1` shows the traceback of a defect of ours; the engine then checks itself when idle, too. Needs nothing
but Python.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rekindle.errors import (
    BadRequest,
    ConfigError,
    HubUnreachable,
    ModelRefused,
    PortTaken,
    RekindleError,
    StoreError,
    StoreLocked,
    StoreRefused,
)

FAILED, REFUSED, TAKEN, AWAY, INTERRUPTED, UNREAD = 1, 2, 3, 4, 130, 141
DEBUG = "REKINDLE_DEBUG"
_COMMAND_LINE = ("typer", "click")  # their exceptions are usage errors and exits, which they show themselves
_EXTRAS = {"matplotlib": "lab", "opentelemetry": "otel"}


# Ctrl-C that counts, whatever the interrupted code makes of it.
#
# Not every KeyboardInterrupt arrives where it should: Python 3.11 turns one raised within `__set_name__` into a
# RuntimeError, of which the lazy imports of transformers make a ModuleNotFoundError. Needs nothing but Python. The
# signal's handler stays Python's own: asyncio replaces no other one by its own, which ends a running task in order.


@contextmanager
def interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt in place of an error that was made of one."""
    try:
        yield
    except Exception as error:
        if _was_interrupted(error):
            raise KeyboardInterrupt from error
        raise


def _was_interrupted(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        seen = seen.__cause__ or seen.__context__
    return seen is not None


def code_of(run: Callable[[], int]) -> int:
    """Run a command and return its exit code; if it fails, write one line to stderr."""
    try:
        with interrupts():
            return run()
    except PortTaken as error:
        return _say(TAKEN, str(error))
    except HubUnreachable as error:
        return _say(AWAY, str(error))
    except (ConfigError, ModelRefused, BadRequest) as error:
        return _say(REFUSED, str(error))
    except (StoreLocked, StoreRefused) as error:  # temporary: the same command may work later
        return _say(FAILED, str(error))
    except StoreError as error:
        return _say(REFUSED, str(error))
    except RekindleError as error:
        return _say(FAILED, str(error))
    except KeyboardInterrupt:
        return _say(INTERRUPTED, "interrupted; what was saved or written until now stays")
    except BrokenPipeError:
        _discard_output()
        return UNREAD
    except ImportError as error:
        return _missing(error)
    except MemoryError:
        return _say(FAILED, "there is not enough memory for this")
    except Exception as error:
        if type(error).__module__.startswith(_COMMAND_LINE):
            raise
        return _unexpected(error)


def flush_output() -> None:
    """Flush stdout and stderr; a reader that is gone is no error."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        _discard_output()


def _say(code: int, message: str) -> int:
    try:
        sys.stderr.write(f"rekindle: {message}\n")
        sys.stderr.flush()
    except (OSError, AttributeError):  # the reader is gone, or there is no such stream
        _discard_output()
    return code


def _discard_output() -> None:
    """Redirect broken streams to /dev/null: Python flushes them at exit and would report an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _missing(error: ImportError) -> int:
    package = (error.name or "").partition(".")[0]
    if not package or package == "rekindle":
        return _unexpected(error)
    extra = _EXTRAS.get(package, "serve")
    return _say(REFUSED, f"this needs the package {package}, which is not installed: pip install 'rekindle[{extra}]'")


def _unexpected(error: Exception) -> int:
    if os.environ.get(DEBUG, "").lower() not in ("", "0", "off", "false"):
        traceback.print_exception(error)
        return FAILED
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _say(FAILED, f"{where}{error.strerror}")
    last = traceback.extract_tb(error.__traceback__)[-1]
    lines = str(error).strip().splitlines() or [""]
    return _say(
        FAILED,
        f"this should not happen, please report it: {type(error).__name__}: {lines[0][:300]} "
        f"({os.path.basename(last.filename)}, line {last.lineno}; {DEBUG}=1 shows the traceback)",
    )
