"""docs/http.md holds what the server says of its interface now."""

from __future__ import annotations

import re

import pytest

from tests.server.conftest import Served
from tools.reference.http import group_of, http
from tools.reference.page import page, path


def test_the_page_is_what_the_tool_writes(served: Served) -> None:
    made = http(served.send("GET", "/openapi.json").json)
    assert path("http").read_text() == page("http", made), "run python -m tools.reference http"


def test_every_route_is_on_it(served: Served) -> None:
    paths = served.send("GET", "/openapi.json").json["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert set(re.findall(r"^### `(\w+ /.*)`$", path("http").read_text(), re.MULTILINE)) == routes


def test_a_path_without_a_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="/v2/chat is in no group"):
        group_of("/v2/chat")
