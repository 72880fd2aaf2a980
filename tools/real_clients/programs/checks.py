"""Shared by the programs of this folder: each runs in one library's environment, with the server's URL as argument.

A program prints a line for each check; `FAILED` begins those of checks that raised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

URL = sys.argv[1]
RULES = "\n".join(f"Rule {number}: speak of the weather of one city at a time, and be brief." for number in range(80))
SYSTEM = f"You are a clerk who knows the weather.\n{RULES}"
LOOK, TALK, MORE = "How is the weather in Paris? step:look", "Hello! step:talk", "What did you say? step:more"
PERSON = "Who wrote the first program? step:person"
SUNNY, HELLO, SAID, NAME, AGE = "It is sunny in Paris.", "Hello, clerk here.", "I said hello.", "Ada", 36


def weather(city: str) -> str:
    """Say how the weather is.

    Args:
        city: where
    """
    return f"sunny in {city}"


def expect(found: object, wanted: object) -> None:
    """Raise AssertionError if what was found is not what was wanted; of texts, if it is not part of it."""
    is_part = isinstance(found, str) and isinstance(wanted, str) and wanted in found
    assert is_part or found == wanted, f"{found!r}, not {wanted!r}"


def run(*checks: Callable[[], None]) -> None:
    """Run the checks; exit with 1 if one failed."""
    failed = 0
    for check in checks:
        try:
            check()
            print("ok", check.__name__, flush=True)
        except Exception as error:
            failed += 1
            words = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"FAILED {check.__name__}: {words[:300]}", flush=True)
    sys.exit(1 if failed else 0)
