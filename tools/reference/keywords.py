"""config/keywords.py: the settings as typed dictionaries, which a type checker cannot derive from the parts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin

from rekindle.config import SETTINGS, KnownSetting, keywords
from rekindle.config.loading import SECTIONS
from rekindle.config.setting import kinds

HEAD = '''"""The settings as Python keyword arguments, for type checkers; made by `python -m tools.reference keywords`.

Sizes may be text ("4GiB"), paths may be text, lists of names may be one text with commas. None means "not given".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict
'''
WITHOUT = '''

class SettingsWithoutModel(TypedDict, total=False):
    """Every setting except the model, named as in flags and files; `store` is a directory, or "off"."""

'''
WITH = '''

class SettingsKeywords(SettingsWithoutModel, total=False):
    """Every setting; `model` is a directory or a hub name, None the bundled one."""

'''
ALSO = {"model": "Path", "slot": "int", "tier": "Path"}  # what is taken as text


def source() -> str:
    """Return the module, not formatted."""
    fields = {name: f"    {name}: {_kind(known)}\n" for name, known in SETTINGS.items()}
    model = fields.pop("model")
    return HEAD + WITHOUT + "".join(fields.values()) + WITH + model


def write() -> None:
    """Write the module."""
    path = Path(keywords.__file__)
    path.write_text(source(), "utf-8")
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", path], check=True)


def _kind(known: KnownSetting) -> str:
    kind, *others = kinds(SECTIONS[known.section][1])[known.field]
    origin = get_origin(kind)
    if known.unit == "size":
        text = "int | str"
    elif origin is Literal:
        text = f"Literal[{', '.join(map(repr, get_args(kind)))}]"
    else:
        names = {Path: "str | Path", tuple: "str | Sequence[str]", Mapping: "Mapping[str, str]"}
        text = names.get(origin or kind) or kind.__name__
    also = f" | {ALSO[known.name]}" if known.name in ALSO else ""
    return text + also + (" | None" if NoneType in others else "")
