"""The settings, from `rekindle.config`: a table per part."""

from __future__ import annotations

from itertools import groupby

from rekindle.config import SETTINGS, KnownSetting
from tools.reference.page import sentence, table

HEAD = ("name", "flag", "variable", "takes", "default", "meaning")


def settings() -> str:
    """Return all tables."""
    groups = groupby(SETTINGS.values(), lambda known: known.group)
    return "\n\n".join(f"## {group}\n\n{table(HEAD, map(_row, members))}" for group, members in groups)


def _row(known: KnownSetting) -> tuple[str, ...]:
    about = known.about
    flag = f"`{known.flag}`" if known.flag else ""
    takes = " ".join(f"`{choice}`" for choice in known.choices) or ", ".join(
        filter(None, (known.unit, str(about.bounds)))
    )
    can_be_written = known.default_text != about.unset and " " not in known.default_text
    default = f"`{known.default_text}`" if can_be_written else known.default_text
    meaning = " ".join(filter(None, (sentence(about.help), about.detail)))
    return f"`{known.name}`", flag, f"`{known.variable}`", takes, default, meaning
