"""Our own description of the HTTP interface, fuzzed: what it allows and what it does not is answered below 500."""

from __future__ import annotations

import os
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.hostile.conftest import ADMIN, KEYS, Target

EXAMPLES = int(os.environ.get("FUZZ_RUNS", "6"))  # of each operation


def test_no_call_breaks_the_server(target: Target) -> None:
    schema = schemathesis.openapi.from_dict(target.send("GET", "/openapi.json").json)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 15
    for operation in operations:
        answered: set[int] = set()
        fuzz(operation, target, answered)
        assert answered, f"{operation.label} was never called"


def fuzz(operation: Any, target: Target, answered: set[int]) -> None:
    """Call one operation with what its schema allows, or nearly."""
    key = ADMIN if operation.path in ("/metrics", "/v1/stats") else KEYS["right"]

    @given(case=operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def call(case: schemathesis.Case) -> None:
        response = case.call(
            base_url=f"http://127.0.0.1:{target.port}", headers={"Authorization": f"Bearer {key}"}, timeout=120
        )
        answered.add(response.status_code)
        assert response.status_code < 500 or response.status_code == 503, case.as_curl_command()

    call()


def test_every_route_is_described(target: Target) -> None:
    paths = target.send("GET", "/openapi.json").json["paths"]
    wanted = {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/agents",
        "/v1/stats",
        "/v1/tokenize",
        "/metrics",
        "/version",
        "/health/live",
        "/health/ready",
    }
    assert wanted <= set(paths)
    assert any(path.endswith("/purge") for path in paths)
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation.get("summary") or operation.get("description"), f"{method} {path} is not described"
