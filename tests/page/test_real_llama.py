"""The page of a front with a real llama-server and real weights. `make engines` builds one."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect

from tests.page.conftest import AWAY, Open, Seen, ask, site_in
from tests.page.test_browser import FACT, QUESTION, restart_under, row
from tools.real_models import REAL_MODELS


def test_agents_of_a_llama_server(tmp_path: Path, opened: Open, seen: Seen) -> None:
    seen.pardoned = AWAY
    model, flags = REAL_MODELS["smollm2"].path(), ["--backend", "llama.cpp", "--max-context", "1024"]
    with site_in(tmp_path, flags=[str(model), *flags, "--backend-flags=-t 1 -np 1"]) as site:
        page = opened(site.url)
        restart_under(page, site)
        for agent in ("bo", "ada"):  # one slot: each time it is the other's
            ask(page, FACT if agent == "bo" else QUESTION, agent=agent)
        expect(row(page, "ada")).to_contain_text("extend")
        page.close()
