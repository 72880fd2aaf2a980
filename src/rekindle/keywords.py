"""Names in keyword arguments and settings: refuse an unknown one and suggest the nearest known one."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the nearest known name, or nothing if none is near."""
    from difflib import get_close_matches  # 3 ms, needed for errors only

    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def check_keywords(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise Python's TypeError for an unknown keyword argument, with a suggestion."""
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}")
