"""docs/models.md and `rekindle models` show the families as they are now."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from rekindle.cli import app
from rekindle.model.families import FAMILIES
from tools.reference.models import models
from tools.reference.page import page, path


def test_the_page_is_what_the_tool_writes() -> None:
    assert path("models").read_text() == page("models", models()), "run python -m tools.reference models"


def test_the_command_prints_every_family() -> None:
    shown = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["models"]).output
    assert [family.name for family in FAMILIES if family.name not in shown] == []
    assert "154.9 MB a snapshot" in shown and "116,480 in the last 1,024" in shown


def test_the_command_prints_json() -> None:
    found = json.loads(CliRunner().invoke(app, ["models", "--json"]).output)
    assert [each["name"] for each in found] == [family.name for family in FAMILIES]
    by_name = {each["example"]["name"]: each["example"] for each in found if each["example"]}
    assert by_name["Qwen3.6-27B"]["kv_bytes_per_token"] == 17920
    assert by_name["Qwen3.6-27B"]["snapshot_bytes"] == 154927104
    assert by_name["Qwen3 8B"]["snapshot_bytes"] is None
