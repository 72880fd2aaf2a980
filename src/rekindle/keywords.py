"""Names that callers write, in keyword arguments and settings: refuse an unknown one with the name that was meant."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" of the known name that is nearest, nothing where none is near."""
    from difflib import get_close_matches  # 3 ms, for an error alone

    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def check_keywords(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise the TypeError that Python has for an unknown keyword argument, with the name that was meant."""
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}")
