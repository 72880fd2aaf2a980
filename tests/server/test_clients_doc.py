"""The page about clients names the headers that are read, all of them and no others."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from rekindle.server.answers.hints import FINAL
from rekindle.server.gate.caller import CLIENT_FAMILIES, OWN_FAMILIES
from rekindle.server.models import DEFAULT

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text("utf-8")


def test_the_page_names_every_header_and_no_other() -> None:
    read = {
        name for family in (*OWN_FAMILIES, *CLIENT_FAMILIES) for name in (family.own, family.sub, family.parent) if name
    }
    quoted = {name.lower() for name in re.findall(r"`([A-Za-z]+(?:[-_][A-Za-z]+)+)`", PAGE)}
    told = {name for name in quoted if name.startswith("x-") or name.endswith(("-id", "_id"))}
    assert told - {"prompt_cache_key", FINAL} == read


def test_codex_settings_are_toml() -> None:
    (settings,) = re.findall(r"config\.toml`[^\n]*\n\n```\n(.*?)```", PAGE, re.DOTALL)
    said = tomllib.loads(settings)
    assert (said["model"], said["model_provider"]) == (DEFAULT, "rekindle"), "its own model's name is not served"
    assert said["model_providers"]["rekindle"]["wire_api"] == "responses"
