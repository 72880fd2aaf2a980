"""docs/settings.md and the keywords hold what the settings say of themselves now."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from rekindle.config import SETTINGS, Settings, keywords
from tools.reference.keywords import source
from tools.reference.page import page, path
from tools.reference.settings import settings


def test_the_page_is_what_the_tool_writes() -> None:
    assert path("settings").read_text() == page("settings", settings()), "run python -m tools.reference settings"


def test_every_setting_is_on_it() -> None:
    assert re.findall(r"^\| `(\w+)` \|", path("settings").read_text(), re.MULTILINE) == list(SETTINGS)


def test_its_file_is_taken() -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```", path("settings").read_text(), re.MULTILINE | re.DOTALL)
    assert Settings.load(tomllib.loads(example)).server.stop_s == 30


def test_the_keywords_for_type_checkers_are_what_the_tool_writes() -> None:
    current, made = (ast.dump(ast.parse(text)) for text in (Path(keywords.__file__).read_text(), source()))
    assert current == made, "run python -m tools.reference keywords"
