"""Pictures of what was measured. Owns the one import of matplotlib, an extra that is asked for if it is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rekindle.errors import ConfigError


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files; ConfigError that says how to install it."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'rekindle[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_plot(path: Path | None) -> None:
    """Raise ConfigError where no picture could be drawn to this path; None: none is wanted.

    To be asked before minutes of work, not after.
    """
    if path is None:
        return
    figure = pyplot().figure()
    kinds = figure.canvas.get_supported_filetypes()
    pyplot().close(figure)
    suffix = path.suffix[1:].lower()
    if suffix not in kinds:
        raise ConfigError(
            f"--plot {path}: no picture of this kind; let the name end in one of {', '.join(sorted(kinds))}"
        )
