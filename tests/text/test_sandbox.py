"""Processes that try grammars: two at a time, bounded, ended with their owner."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from rekindle.errors import RequestFailed
from rekindle.text.constraints.compiling import TOO_COMPLEX, Words
from rekindle.text.constraints.sandbox import Sandbox, Tried
from rekindle.text.constraints.schema import schema_rule

WORDS = Words([bytes([byte]) for byte in range(256)] + [b"<end>"], [256], [256], list)
ENDLESS = {"type": "integer", "multipleOf": 99_999_989}  # takes minutes


def grammar(schema: dict[str, object]) -> dict[str, str]:
    return {"grammar": json.dumps({"grammars": [schema_rule(schema)]})}


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(WORDS)
    yield made
    made.close()


def test_a_grammar_need_not_wait_for_another_that_takes_long(sandbox: Sandbox) -> None:
    """Five seconds of processor time for one: the other is done before, or it waits for all of them."""
    found: list[Tried] = []
    slow = threading.Thread(target=lambda: found.append(sandbox.tried(grammar(ENDLESS), seconds=5)))
    slow.start()
    assert sandbox.tried(grammar({"type": "integer"}), seconds=5).error == ""
    assert sandbox.tried(grammar({"type": "string"}), seconds=5).error == ""
    assert slow.is_alive() and not found
    slow.join()
    assert found[0].error == TOO_COMPLEX


def test_what_is_closed_tries_nothing_and_leaves_no_process(sandbox: Sandbox) -> None:
    jobs = [threading.Thread(target=lambda: sandbox.tried(grammar({"type": "integer"}), seconds=5)) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    sandbox.close()
    sandbox.close()
    with pytest.raises(RequestFailed, match="closed"):
        sandbox.tried(grammar({"type": "integer"}), seconds=5)
