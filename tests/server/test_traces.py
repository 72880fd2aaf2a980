"""Spans of requests as a collector gets them: by the official SDK and exporter, over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from rekindle.config import ServerSettings
from tests.server.conftest import Served, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ExportTraceServiceRequest]]:
    """A collector: what was sent to it."""
    found: list[ExportTraceServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            found.append(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        yield found
        server.shutdown()
        thread.join()


def attributes(span: Span) -> dict[str, Any]:
    found = {each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in span.attributes}
    return {
        name: [each.string_value for each in value.values] if hasattr(value, "values") else value
        for name, value in found.items()
    }


def test_a_collector_gets_each_request_with_its_phases_and_no_text(
    served: Served, collected: list[ExportTraceServiceRequest]
) -> None:
    with serving(served.engine, ServerSettings(traces=True)) as running:
        body = {
            "messages": [{"role": "user", "content": "Where is the zebra lamp?"}],
            "temperature": 0.5,
            "max_tokens": 4,
        }
        answer = running.send(
            "POST",
            "/v1/chat/completions",
            body | {"stream": True},
            x_agent_id="traced",
            traceparent=f"00-{TRACE}-{PARENT}-01",
        )
        assert answer.status == 200
        refused = running.send("POST", "/v1/chat/completions", {"messages": "zebra"})
        assert refused.status == 400
        assert running.send("GET", "/v1/agents").status == 200
    spans = [
        span
        for request in collected
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    about = collected[0].resource_spans[0].resource.attributes
    assert {each.key: each.value.string_value for each in about}["service.name"] == "rekindle"
    (root,) = [span for span in spans if span.trace_id.hex() == TRACE and span.kind == Span.SPAN_KIND_SERVER]
    assert root.parent_span_id.hex() == PARENT
    said = attributes(root)
    assert said["gen_ai.operation.name"] == "chat" and root.name == f"chat {said['gen_ai.response.model']}"
    assert (said["gen_ai.conversation.id"], said["gen_ai.request.temperature"], said["gen_ai.request.max_tokens"]) == (
        "traced",
        0.5,
        4,
    )
    assert said["gen_ai.usage.input_tokens"] == (
        said["gen_ai.usage.cache_read.input_tokens"] + said["rekindle.computed_tokens"]
    )
    assert said["gen_ai.usage.output_tokens"] in range(1, 5) and said["http.response.status_code"] == 200
    assert said["gen_ai.response.finish_reasons"] in (["stop"], ["length"])
    phases = {span.name: span for span in spans if span.parent_span_id == root.span_id}
    assert list(phases) == ["match", "load", "queue", "prefill", "decode"]
    ends = [span.end_time_unix_nano for span in phases.values()]
    assert ends == sorted(ends)
    assert [span.start_time_unix_nano for span in phases.values()][1:] == ends[:-1]
    assert root.start_time_unix_nano <= phases["match"].start_time_unix_nano
    assert ends[-1] <= root.end_time_unix_nano
    assert phases["prefill"].end_time_unix_nano > phases["prefill"].start_time_unix_nano
    (failed,) = [span for span in spans if span.status.code == Status.STATUS_CODE_ERROR]
    assert attributes(failed)["error.type"] == "400" and attributes(failed)["http.response.status_code"] == 400
    assert failed.trace_id.hex() != TRACE
    assert len(spans) == 7
    assert b"zebra" not in b"".join(request.SerializeToString() for request in collected)
