"""The object tier in S3's protocol, by a server on loopback: a killed replica's agents, two writers, a stranger."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import BotoCoreError

from rekindle_tier.location import open_location
from rekindle_tier.objects import Objects
from rekindle_tier.sealing import Sealer
from tests.engine.replicas import Replicas, after_a_kill, ask, exported, figures, history, running
from tests.server.scripted import write_scripted_model

START_S = 60.0
BUCKET = "memory"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Where the server listens, with a bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Path(sys.executable).with_name("moto_server")
    with subprocess.Popen([server, "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            make_bucket(url)
            yield url
        finally:
            process.kill()


def make_bucket(url: str) -> None:
    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1"
    )
    end = time.monotonic() + START_S
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            return
        except BotoCoreError:
            assert time.monotonic() < end, "the server does not start"
            time.sleep(0.1)


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A tier of this test, whose endpoint and credentials are in the environment."""
    variables = {"ENDPOINT_URL": endpoint, "REGION": "us-east-1"}
    for name, value in (variables | {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return f"s3://{BUCKET}/{request.node.name}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted") / "model")


@pytest.fixture
def replicas(model: Path, tmp_path: Path) -> Iterator[Replicas]:
    yield from running(model, tmp_path)


def test_an_agent_survives_its_replica_killed_at_work(replicas: Replicas, bucket: str) -> None:
    wanted, went_on = after_a_kill(replicas, bucket)
    assert went_on.report.outcome == "extend" and went_on.token_ids == wanted.token_ids
    assert went_on.report.reused_tokens >= wanted.report.reused_tokens - 16, "all but one block"


def test_branches_of_two_replicas_are_both_kept(replicas: Replicas, bucket: str) -> None:
    one, other, third = (replicas.start(name, tier=bucket) for name in ("one", "other", "third"))
    first = ask(one, history())
    exported(one)
    here, there = history(turns=[first.text, "talk of the left"]), history(turns=[first.text, "talk of the right"])
    asking = threading.Thread(target=ask, args=(other, there))
    asking.start()
    left = ask(one, here)
    asking.join()
    exported(one)
    exported(other)
    for said in (here, there):
        words = [*(each["content"] for each in said[1:]), left.text, "talk on"]
        went_on = ask(third, history(turns=words))
        assert went_on.report.outcome == "extend"
        assert went_on.report.reused_tokens >= left.report.prompt_tokens - 16, "all but one block"
    assert len(third.agent("ada").info().branch_infos) == 2


def test_a_swap_needs_the_version_that_was_read(bucket: str) -> None:
    objects = Objects(open_location(bucket), Sealer(b"s" * 32), "model", directory=None)
    try:
        first = objects.swap("heads/one", b"1", None)
        assert first is not None and objects.swap("heads/one", b"2", None) is None, "it is there by now"
        second = objects.swap("heads/one", b"2", first)
        assert second is not None and objects.swap("heads/one", b"3", first) is None, "another has written since"
        assert objects.get("heads/one") == (b"2", second)
        assert [each.name for each in objects.list("heads")] == ["heads/one"] and objects.list("blocks") == []
        objects.delete(["heads/one", "never there"])
        assert objects.get("heads/one") is None and objects.swap("heads/one", b"3", second) is None
    finally:
        objects.close()


def test_a_bucket_that_is_not_there_is_said(replicas: Replicas, bucket: str) -> None:
    engine = replicas.start("one", tier=bucket.replace(BUCKET, "forgotten"))
    assert ask(engine, history()).report.outcome == "miss" and engine.flush()
    end = time.monotonic() + START_S
    while not engine.health().problems:
        assert time.monotonic() < end, figures(engine)
        time.sleep(0.05)
    (problem,) = engine.health().problems
    assert "the object tier s3://forgotten/" in problem and "(its bucket is not there: " in problem
    assert figures(engine)["exported_objects"] == 0
