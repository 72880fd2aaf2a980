"""Plots of measurements. Owns the only import of matplotlib, an optional extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rekindle.errors import ConfigError


def pyplot() -> Any:
    """Return matplotlib.pyplot, drawing into files; ConfigError with how to install it if it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'rekindle[lab]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_plot(path: Path | None) -> None:
    """Raise ConfigError if no plot can be written to this path; None: no plot is wanted.

    Call it before minutes of work, not after.
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
