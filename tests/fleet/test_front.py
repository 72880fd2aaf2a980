"""A front over vLLM with our connector: a re-tokenised history with and without it, and after a kill -9 of vLLM.

Also a vLLM that the front starts itself.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.coding_day.server import serving
from benchmarks.vllm.engine import MODEL
from rekindle.config import Settings
from rekindle.engine.api import Engine
from tests.fleet.serving import WAIT_S, until
from tests.fleet.vllm_server import ENVIRONMENT, free_port, saved_blocks, server, wait_for

BLOCK_TOKENS = 64
DETAILS = "--enable-prompt-tokens-details"
SYSTEM = "You are a clerk who reads letters and answers politely. " * 24


def post(port: int, path: str, body: dict[str, Any], agent: str = "ada") -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Agent-ID": agent},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        found: dict[str, Any] = json.load(response)
    return found


def chat(port: int, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    """The answer of a front, with the ids of prompt and reply."""
    return post(port, "/v1/chat/completions", {"messages": messages, "rekindle": {"return_ids": True}, **more})


def front_of(port: int, store: Path) -> Any:
    settings = {"model": str(MODEL), "store": str(store), "backend": f"vllm=http://127.0.0.1:{port}"}
    return serving(Settings.load(settings), datetime.now)


def cached(port: int, ids: list[int]) -> int:
    """What vLLM reuses of a prompt of ids, asked without a front."""
    answer = post(port, "/v1/completions", {"model": "pocket", "prompt": ids, "max_tokens": 1})
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))


def fresh_ids(front: Engine, port: int, messages: list[dict[str, str]]) -> list[int]:
    ids: list[int] = post(port, "/v1/tokenize", {"messages": messages})["ids"]
    return ids


def talked(front: Engine, port: int) -> tuple[list[dict[str, str]], list[int], list[int]]:
    """A history whose reply encodes to other tokens than were sampled, its stored ids, and a fresh encoding."""
    for seed in range(20):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Write letter {seed}."}]
        first = chat(port, messages, temperature=1.3, max_tokens=400, seed=seed, min_tokens=300)
        text = first["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Thanks. Shorter, please."}]
        stored = [*first["rekindle"]["prompt_ids"], *first["rekindle"]["completion_ids"]]
        fresh = fresh_ids(front, port, messages)
        key = front.encoder.key_of(np.asarray(stored, dtype=np.uint32))
        is_sent_back = front.encoder.key_of(np.asarray(fresh, dtype=np.uint32)).startswith(key)
        if is_sent_back and "\ufffd" not in text and fresh[: len(stored)] != stored:
            return messages, stored, fresh
    raise AssertionError("every reply encodes to the tokens that were sampled")


def test_a_history_sent_back_as_text_continues_its_blocks(tmp_path: Path) -> None:
    with server(tmp_path, DETAILS) as port, front_of(port, tmp_path / "texts") as (front, front_port):
        assert "its tokenizer is the same" in " ".join(front.notes)
        messages, stored, fresh = talked(front, front_port)
        cached(port, stored)  # without a front there is no salt: what was generated is computed once more
        alone = cached(port, fresh)
        second = chat(front_port, messages, max_tokens=4, temperature=0)["rekindle"]
        assert second["outcome"] == "extend" and second["explanation"] is None
        assert second["prompt_ids"][: len(stored)] == stored
        assert second["reused_tokens"] >= len(stored) - BLOCK_TOKENS > alone
        print(f"\n{len(stored)} stored; front: {second['reused_tokens']} of {second['prompt_tokens']} reused, "
              f"alone: {alone} of {len(fresh)}")  # fmt: skip
        front.flush()
        time.sleep(2)  # records are written after the answer
    with server(tmp_path, DETAILS) as port, front_of(port, tmp_path / "texts") as (_, front_port):
        again = chat(front_port, messages, max_tokens=4, temperature=0)["rekindle"]
        assert again["outcome"] == "exact" and again["completion_ids"] == second["completion_ids"]
        assert again["reused_tokens"] >= len(stored) - BLOCK_TOKENS
        print(f"after a kill -9 of vLLM and a restart of the front: {again['reused_tokens']} reused")


def test_namespaces_share_nothing_hot_and_errors_are_passed_on(tmp_path: Path) -> None:
    with server(tmp_path, DETAILS) as port:
        settings = {"model": str(MODEL), "store": str(tmp_path / "texts"), "backend": f"vllm=http://127.0.0.1:{port}"}
        with Engine(Settings.load(settings)) as front:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Good morning."}]
            options: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
            reused = [
                front.chat(agent, messages, namespace=namespace, **options).report.reused_tokens
                for agent, namespace in (("ada", "default"), ("eve", "default"), ("bob", "other"))
            ]
            assert reused[0] == reused[2] == 0 and reused[1] > 200
            scored = front.chat("ada", messages, logprobs=2, **options)
            assert len(scored.logprobs) == len(scored.token_ids) and len(scored.logprobs[0].top) == 2
            assert scored.logprobs[0].token_id == scored.token_ids[0] == scored.logprobs[0].top[0].token_id
            pieces = list(front.stream("ada", messages, **options))
            assert tuple(i for piece in pieces for i in piece.token_ids) == scored.token_ids and len(pieces) > 2
    with pytest.raises(urllib.error.URLError):
        post(port, "/v1/completions", {})


@contextmanager
def front_with_its_own(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`rekindle serve --backend vllm`, its process and port; killed at the end."""
    port = free_port()
    flags = "--dtype bfloat16 --max-model-len 2048 --enforce-eager --block-size 64 --distributed-executor-backend uni"
    command = [sys.executable, "-m", "rekindle.cli", "serve", "--port", str(port), "--store", str(directory / "texts")]
    with (directory / "log").open("a") as log:
        process = subprocess.Popen(
            [*command, "--backend", "vllm", "--backend-flags", flags], env=ENVIRONMENT, stdout=log, stderr=log
        )
    try:
        wait_for(port, process, directory / "log")
        yield process, port
    finally:
        process.kill()
        process.wait()


def test_a_vllm_that_the_front_starts_ends_with_it_and_is_warm_again(tmp_path: Path) -> None:
    messages, reports = [{"role": "system", "content": SYSTEM}], []
    with front_with_its_own(tmp_path) as (front, port):
        for turn in range(3):
            messages.append({"role": "user", "content": f"Remember that key {turn} is in the attic."})
            answer = chat(port, messages, max_tokens=12, temperature=0)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            reports.append(answer["rekindle"])
        assert [report["outcome"] for report in reports] == ["miss", "extend", "extend"]
        first, second, third = reports
        assert first["reused_tokens"] == 0
        for before, after in ((first, second), (second, third)):
            known = len(before["prompt_ids"]) + len(before["completion_ids"])
            assert known - BLOCK_TOKENS <= after["reused_tokens"] < known
        num_blocks = third["prompt_tokens"] // BLOCK_TOKENS
        until(lambda: saved_blocks(tmp_path / "texts" / "vllm") >= num_blocks, "the records")
        assert chat(port, messages[:-1], max_tokens=1)["rekindle"]["outcome"] == "exact"  # and its text is durable
        started = psutil.Process(front.pid).children(recursive=True)
        assert len(started) >= 3  # keeper, API server, engine
        front.kill()
        assert not psutil.wait_procs(started, timeout=WAIT_S)[1]
    with front_with_its_own(tmp_path) as (front, port):
        again = chat(port, messages[:-1], max_tokens=12, temperature=0)["rekindle"]
        assert again["outcome"] == "exact" and again["completion_ids"] == third["completion_ids"]
        assert again["reused_tokens"] == num_blocks * BLOCK_TOKENS
        started = psutil.Process(front.pid).children(recursive=True)
        front.send_signal(signal.SIGTERM)
        front.wait(WAIT_S)
        assert not psutil.wait_procs(started, timeout=WAIT_S)[1]
