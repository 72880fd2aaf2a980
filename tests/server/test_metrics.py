"""Figures for Prometheus: what was asked, what it cost, and no label without a bound."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send

from rekindle import Engine
from rekindle.engine.types import Delta, Normalised
from rekindle.errors import Overloaded
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.gauges import EngineCollector
from rekindle.server.observers.metrics import Counted, Metrics
from rekindle.text import messages
from tests.engine.replicas import ask, exported, history, running
from tests.server.conftest import Served
from tests.server.scripted import write_scripted_model
from tests.server.test_log import report

SAID = messages.Message("assistant", "Hi.")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: bytes) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return sum(
        number for (known, given), number in found.items() if known == name and labels.items() <= dict(given).items()
    )


def test_what_was_normalised_is_counted_by_its_kind() -> None:
    metrics = Metrics("toy")
    items = (Normalised("attribution", 0, "x: 1", 90), Normalised("tools", None, "b, a", 0))
    watch = metrics.began(Caller(), "/v1/messages", {})
    watch.finished(1, replace(report(100, 90, 0, 1.0), normalised=items), "stop", reply=SAID)
    found = samples(metrics.text())
    for kind, tokens in (("attribution", 90), ("tools", 0)):
        assert value(found, "rekindle_normalised_total", kind=kind) == 1
        assert value(found, "rekindle_normalised_tokens_total", kind=kind) == tokens


def test_tokens_and_times_of_one_request() -> None:
    now = 10.0
    metrics = Metrics("toy", clock=lambda: now)
    warm = report(100, 60, 30, 50.0)
    watch = metrics.began(Caller("default", "ada"), "/v1/chat/completions", {})
    watch.delta(0, Delta("a", (1,), report=warm))
    now += 0.02
    watch.delta(0, Delta("", ()))
    now += 0.02
    watch.delta(0, Delta("bc", (2, 3)))
    watch.delta(1, Delta("x", (9,)))
    now += 1.0
    watch.delta(0, Delta("d", (4,), "stop", warm))
    watch.finished(1, warm, "stop", reply=SAID)
    found = samples(metrics.text())
    kind = {"outcome": "extend", "tier": "mixed"}
    assert value(found, "rekindle_inter_token_seconds_count", **kind) == 3
    assert value(found, "rekindle_inter_token_seconds_sum", **kind) == pytest.approx(1.04)
    assert value(found, "rekindle_inter_token_seconds_bucket", le="0.025", **kind) == 2
    assert value(found, "rekindle_first_token_seconds_sum", **kind) == pytest.approx(0.051)
    assert value(found, "rekindle_prefill_seconds_sum") == 0.05
    assert value(found, "rekindle_prompt_tokens_total", tier="mixed") == 100
    assert value(found, "rekindle_reused_tokens_total", tier="hot") == 60
    assert value(found, "rekindle_reused_tokens_total", tier="warm") == 30
    assert value(found, "rekindle_computed_tokens_total") == 10
    assert value(found, "rekindle_generated_tokens_total") == 5
    vllm = {"model_name": "toy"}
    assert value(found, "vllm:prefix_cache_queries_total", **vllm) == 100
    assert value(found, "vllm:prefix_cache_hits_total", **vllm) == 90
    assert value(found, "vllm:prompt_tokens_total", **vllm) == 100
    assert value(found, "vllm:generation_tokens_total", **vllm) == 5
    assert value(found, "vllm:time_to_first_token_seconds_count", **vllm) == 1
    assert value(found, "vllm:request_success_total", finished_reason="stop", **vllm) == 1
    assert value(found, "vllm:e2e_request_latency_seconds_sum", **vllm) == pytest.approx(1.04)


def test_what_never_came_to_a_token_has_no_times() -> None:
    metrics = Metrics("toy")
    watch = metrics.began(Caller(), "/v1/completions", {})
    watch.finished(1, report(100, 0, 0, float("nan")), "cancelled", reply=SAID)
    watch.failed(None, Overloaded("full", retry_after_s=1))
    found = samples(metrics.text())
    assert value(found, "rekindle_first_token_seconds_count") == 0
    assert value(found, "rekindle_answers_total", finish_reason="cancelled", tier="cold") == 1
    assert value(found, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(found, "rekindle_failures_total", status="503") == 1


def test_two_applications_have_figures_of_their_own() -> None:
    first, second = Metrics("toy"), Metrics("toy")
    first.began(Caller(), "/", {}).finished(1, report(10, 0, 0, 1.0), "stop", reply=SAID)
    assert value(samples(second.text()), "rekindle_answers_total") == 0


@pytest.mark.parametrize(("heard", "status"), [("http.request", "503"), ("http.disconnect", "499")])
def test_what_is_said_to_a_client_that_left_is_no_failure_of_the_server(heard: str, status: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 503, "headers": []})

    async def receive() -> Message:
        return {"type": heard}

    async def send(message: Message) -> None:
        return None

    metrics = Metrics("toy")
    asyncio.run(Counted(app, metrics=metrics)({"type": "http", "method": "POST"}, receive, send))
    assert value(samples(metrics.text()), "rekindle_requests_total", status=status) == 1


def test_a_scrape_tells_of_engine_store_and_routes(served: Served) -> None:
    def scraped() -> Samples:
        answer = served.send("GET", "/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        return samples(answer.body)

    served.until_idle()
    assert served.engine.flush(), "what other tests have said is counted"
    before = scraped()
    reply = served.chat("A brass key lies under the mat of the porch.", agent="a-scraped-agent").json
    served.send("GET", "/v1/agents/a-scraped-agent")
    served.send("GET", "/nowhere/at/all")
    served.send("MAKEUP", "/nowhere")
    assert served.engine.flush()
    after = scraped()

    def grew(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grew("rekindle_requests_total", endpoint="/v1/chat/completions", method="POST", status="200") == 1
    assert grew("rekindle_requests_total", endpoint="/v1/agents/{id}", method="GET", status="200") == 1
    assert grew("rekindle_requests_total", endpoint="other", method="other", status="404") == 2
    assert grew("rekindle_prompt_tokens_total") == grew("vllm:prompt_tokens_total") == reply["usage"]["prompt_tokens"]
    assert grew("rekindle_generated_tokens_total") == reply["usage"]["completion_tokens"]
    assert grew("rekindle_inter_token_seconds_count") == reply["usage"]["completion_tokens"] - 1
    assert grew("rekindle_turns_saved_total") == 1
    assert grew("rekindle_disk_written_bytes_total") > 0
    stats = served.engine.stats()
    assert value(after, "rekindle_pool_blocks") == stats.num_blocks
    assert value(after, "rekindle_disk_used_bytes") > 0
    assert value(after, "rekindle_disk_budget_bytes") > 0
    names = {name for name, _ in after}
    wanted = (
        "rekindle_running_requests rekindle_waiting_requests rekindle_save_queue rekindle_unsaved_evicted_total "
        "rekindle_stalls_total rekindle_preemptions_total rekindle_bad_records_total rekindle_failed_saves_total "
        "rekindle_draft_tokens_total rekindle_accepted_draft_tokens_total "
        "rekindle_evictions_total rekindle_disk_read_bytes_total rekindle_index_bytes rekindle_saving_ok "
        "vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc"
    )
    assert set(wanted.split()) <= names
    assert not [labels for _, labels in after for _, text in labels if "scraped" in text or "nowhere" in text]


def test_times_between_tokens_are_told_apart_by_the_choice() -> None:
    now = 0.0
    metrics = Metrics("toy", clock=lambda: now)
    watch = metrics.began(Caller(), "/v1/completions", {})
    watch.delta(0, Delta("a", (1,), report=report(10, 0, 0, 1.0)))
    watch.delta(1, Delta("b", (1,), report=report(10, 9, 0, 1.0)))
    for choice in (0, 1, 1):
        now += 0.1
        watch.delta(choice, Delta("c", (2,)))
    found = samples(metrics.text())
    assert value(found, "rekindle_inter_token_seconds_count", tier="cold") == 1
    assert value(found, "rekindle_inter_token_seconds_count", tier="hot") == 2


def test_a_scrape_has_what_an_object_tier_did(tmp_path: Path) -> None:
    for replicas in running(write_scripted_model(tmp_path / "model"), tmp_path):
        one, other = replicas.start("one"), replicas.start("other")
        first = ask(one, history())
        exported(one)
        reply = ask(other, history(turns=[first.text, "talk on"]))
        exported(other)
        wrote, read = scrape(one), scrape(other)
        assert value(wrote, "rekindle_object_tier_objects_total", direction="export") == len(first.prompt_ids) // 16 + 1
        assert value(wrote, "rekindle_object_tier_heads_written_total") == 1
        assert value(wrote, "rekindle_object_tier_imported_tokens_total") == 0
        assert value(read, "rekindle_object_tier_imported_tokens_total") == reply.report.warm_tokens
        assert value(read, "rekindle_object_tier_bytes_total", direction="import") > 1000
        assert value(read, "rekindle_object_tier_waited_seconds_total") > 0
        assert value(read, "rekindle_object_tier_answering") == 1
        assert not [name for name, _ in scrape(replicas.start("alone", tier=None)) if "object_tier" in name]


def scrape(engine: Engine) -> Samples:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, "toy"))
    return samples(generate_latest(registry))
