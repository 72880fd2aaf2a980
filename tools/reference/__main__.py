"""Write the parts of docs/ that are generated from the code, and the keywords of the settings.

python -m tools.reference            # all of them
python -m tools.reference settings   # docs/settings.md, from rekindle.config
python -m tools.reference models     # docs/models.md, from rekindle.model.families
python -m tools.reference keywords   # src/rekindle/config/keywords.py, from rekindle.config
"""

from __future__ import annotations

import sys

from rekindle import Engine
from rekindle.server.app import create_app
from rekindle.server.schema import describe
from tools.reference.http import http
from tools.reference.keywords import write
from tools.reference.models import models
from tools.reference.page import page, path
from tools.reference.settings import settings


def served_http() -> str:
    """Describe the interface of a server with the bundled model and default settings."""
    with Engine.from_pretrained(store="off") as engine:
        app = create_app(engine, engine.settings.server)
        try:
            return http(describe(app, events=app.events, max_choices=engine.settings.cache.max_branches))
        finally:
            app.close()


PARTS = {"settings": settings, "models": models, "http": served_http}


def main() -> None:
    """Write the named pages, or all."""
    for name in sys.argv[1:] or ("keywords", *PARTS):
        if name == "keywords":
            write()
            continue
        if name not in PARTS:
            sys.exit(f"{name}: use keywords, {', '.join(PARTS)}")
        path(name).write_text(page(name, PARTS[name]()), "utf-8")


if __name__ == "__main__":
    main()
