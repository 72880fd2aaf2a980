"""An hour of everything at once against a real server: nothing may grow, and only clear refusals may fail.

    SOAK_S=300 python tools/soak.py                  # the bundled model, five minutes
    python tools/soak.py --model /tmp/24-layer       # another one (tools/make_model.py), an hour

Random agents talk, are cancelled, forked, rewound, pinned, offloaded, deleted and purged over HTTP; the server has
little hot memory and a small disk budget, and SIGKILL ends its first life during the work. Then a stream runs while
prompts of 4,096 tokens (or the model's maximum) arrive. Memory, descriptors, threads and disk are sampled over each
life; its last third is compared with the previous one. Prints a JSON report; exit code 1 if something grew, an
answer was a 5xx other than 503, or p99 of the gaps between the stream's tokens exceeds twice `max_stall_s`. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from rekindle.harness.client import HOST, ServerProcess
from rekindle.harness.http import connect, events, url_of
from rekindle_pocket import conversations

MIB = 1 << 20
HOT_BYTES, DISK_BYTES = 24 * MIB, 12 * MIB
MAX_STALL_S = 0.25
NUM_WORKERS, NUM_AGENTS = 6, 30
PROMPT_TOKENS = 4096
REFUSALS = {400, 404, 409, 429, 503}
# How much the last third may exceed the previous one: allocator noise, not a leak.
SLACK = {"rss_bytes": 24 * MIB, "descriptors": 16, "threads": 4, "index_bytes": 2 * MIB, "agents": 200}


@dataclass
class Tally:
    """Counts of answers, and unexpected failures."""

    answers: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, status: int, body: bytes = b"") -> None:
        """Count an answer."""
        with self.lock:
            self.answers[f"{what} {status}"] += 1
            if status != 200 and status not in REFUSALS:
                self.failures.append(f"{what}: {status} {body[:300]!r}")


class Worker(threading.Thread):
    """Performs random actions until stopped; a connection error is a failure unless the stop follows within 0.5 s."""

    def __init__(self, port: int, seed: int, tally: Tally, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._random, self._tally, self._stop_now = random.Random(seed), tally, stop
        self._http = connected(port)
        self._memory = conversations.Memory("Nadia", "archivist")
        self._histories: dict[str, list[dict[str, str]]] = {}

    def run(self) -> None:
        """Perform actions until stopped."""
        while not self._stop_now.is_set():
            try:
                self._act()
            except httpx.HTTPError as error:
                if not self._stop_now.wait(0.5):
                    with self._tally.lock:
                        self._tally.failures.append(f"connection: {type(error).__name__}: {error}")

    def _act(self) -> None:
        agent = f"agent-{self._random.randrange(NUM_AGENTS)}"
        name = quote(agent, safe="")
        draw = self._random.random()
        if draw < 0.70:
            self._talk(agent if draw < 0.60 else None)
        elif draw < 0.76:
            target = f"agent-{self._random.randrange(NUM_AGENTS)}"
            self._ask("fork", "POST", f"/v1/agents/{name}/fork", {"target": target})
        elif draw < 0.80:
            self._ask("rewind", "POST", f"/v1/agents/{name}/rewind", {"turns": 1})
        elif draw < 0.84:
            self._ask("pin", "POST", f"/v1/agents/{name}/pin", {"ttl_s": 5})
        elif draw < 0.88:
            self._ask("offload", "POST", f"/v1/agents/{name}/offload", None)
        elif draw < 0.92:
            self._histories.pop(agent, None)
            self._ask("delete", "DELETE", f"/v1/agents/{name}", None)
        elif draw < 0.94:
            self._histories.pop(agent, None)
            self._ask("purge", "POST", f"/v1/agents/{name}/purge", None)
        else:
            self._ask("list", "GET", self._random.choice(("/v1/agents", f"/v1/agents/{name}/why", "/v1/stats")), None)

    def _talk(self, agent: str | None) -> None:
        r = self._random
        messages = self._histories.setdefault(agent, []) if agent else []
        if len(messages) > 12:
            messages.clear()
        if not messages:
            messages.append({"role": "system", "content": conversations.story(random.Random(r.randrange(5)), 20)})
        messages.append({"role": "user", "content": f"Remember that {conversations.fact(r, self._memory)[1]}."})
        body = {"messages": messages, "max_tokens": r.randrange(1, 40), "stream": True, "temperature": r.choice((0, 1))}
        cancel_after = r.randrange(1, 5) if r.random() < 0.2 else None
        texts: list[str] = []
        headers = {"X-Agent-ID": agent} if agent else {}
        with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.is_success:
                for number, (_, chunk) in enumerate(events(response)):
                    if number == cancel_after:
                        break
                    for choice in (chunk or {}).get("choices", ()):
                        texts.append(choice["delta"].get("content") or "")
            self._tally.note("chat cancelled" if cancel_after else "chat", response.status_code)
        messages.append({"role": "assistant", "content": "".join(texts) or "-"})

    def _ask(self, what: str, method: str, path: str, body: Any) -> None:
        response = self._http.request(method, path, json=body)
        self._tally.note(what, response.status_code, response.content)


def connected(port: int) -> httpx.Client:
    """Return a client of the server."""
    return connect(url_of(HOST, port), timeout_s=120)


def fetched(port: int, method: str, path: str, body: Any = None) -> Any:
    """Send a request and return its JSON answer."""
    answer = connected(port).request(method, path, json=body)
    assert answer.is_success, answer.text
    return answer.json()


def sample(pid: int, store: Path, port: int) -> dict[str, float]:
    """Return figures that must not grow."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    shards = [path.stat().st_blocks * 512 for path in store.rglob("*.safetensors")]
    index = [path.stat().st_size for path in store.rglob("index.db*")]
    stats = fetched(port, "GET", "/v1/stats")
    return {
        "rss_bytes": int(resident.split()[1]) * 1024,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "shard_bytes": sum(shards),
        "index_bytes": sum(index),
        "agents": stats.get("num_agents", 0),
    }


def live(server: ServerProcess, store: Path, seconds: float, number: int, tally: Tally) -> list[dict[str, float]]:
    """Run one life of a server under load and return its samples. A kill under load ends the first life."""
    stop = threading.Event()
    workers = [Worker(server.port, 100 * number + worker, tally, stop) for worker in range(NUM_WORKERS)]
    for worker in workers:
        worker.start()
    samples, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(min(2.0, seconds / 60))
        samples.append(sample(server.pid, store, server.port))
    stop.set()
    if number == 0:
        server.kill()
    for worker in workers:
        worker.join(120)
    return samples


def growth(samples: Sequence[dict[str, float]]) -> tuple[dict[str, Any], list[str]]:
    """Return medians of the second and the last third with the maximum, and what grew between them."""
    third = len(samples) // 3
    found, grown = {}, []
    for name in samples[0]:
        before = statistics.median(one[name] for one in samples[third : 2 * third])
        after = statistics.median(one[name] for one in samples[2 * third :])
        found[name] = [before, after, max(one[name] for one in samples)]
        if name in SLACK and after > 1.05 * before + SLACK[name]:
            grown.append(f"{name} grew from {before:.0f} to {after:.0f}")
    if found["shard_bytes"][2] > 1.1 * DISK_BYTES + 4 * MIB:
        grown.append(f"shards take {found['shard_bytes'][2]:.0f} bytes of {DISK_BYTES}")
    return found, grown


def gaps(port: int, seconds: float) -> dict[str, float]:
    """Measure seconds between tokens of a running stream while long prompts arrive one after another."""
    words = " ".join(conversations.story(random.Random(9), 400).split())
    encoded = fetched(port, "POST", "/v1/tokenize", {"text": words})
    ids, num_tokens = encoded["ids"], min(PROMPT_TOKENS, encoded["max_model_len"] - 8)
    stop, busy, times, num_prompts = threading.Event(), threading.Event(), list[float](), 0
    client = connected(port)

    def read() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            messages = [{"role": "user", "content": f"Tell me story {number}."}]
            body = {"messages": messages, "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 1}
            headers, last = {"X-Agent-ID": f"stream-{number}"}, None
            with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                for _, chunk in events(response):
                    now = time.perf_counter()
                    if chunk and last is not None and busy.is_set():
                        times.append(now - last)
                    last = now
                    if stop.is_set():
                        break

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    until, r = time.monotonic() + seconds, random.Random(3)
    while time.monotonic() < until:
        busy.set()
        prompt = r.choices(ids, k=num_tokens)
        fetched(port, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        num_prompts += 1
    stop.set()
    reader.join(120)
    times.sort()
    return {
        "tokens": len(times),
        "prompts": num_prompts,
        "prompt_tokens": num_tokens,
        "p50_s": round(times[len(times) // 2], 4),
        "p99_s": round(times[int(len(times) * 0.99)], 4),
        "max_s": round(times[-1], 4),
    }


def main() -> int:
    """Run two lives and a stream; print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory [the bundled model]")
    given = parser.parse_args()
    seconds = float(os.environ.get("SOAK_S", "3600"))
    tally, lives, grown = Tally(), [], list[str]()
    with tempfile.TemporaryDirectory(prefix="rekindle-soak-") as name:
        store, log = Path(name, "store"), Path(name, "log")
        flags = ["--store", str(store), "--hot-bytes", str(HOT_BYTES), "--disk-bytes", str(DISK_BYTES)]
        flags += [
            "--max-stall-s",
            str(MAX_STALL_S),
            "--anonymous-ttl-s",
            "30",
            "--threads",
            "1",
        ]
        flags += ["--model", given.model] if given.model else []
        for number in range(2):
            with ServerProcess(flags, log=log) as server:
                server.wait_ready()
                found, more = growth(live(server, store, 0.4 * seconds, number, tally))
                lives.append(found)
                grown += more
                if number == 1:
                    between = gaps(server.port, 0.2 * seconds)
                    ready = fetched(server.port, "GET", "/health/ready")
                server.kill()
        problems = [line for line in log.read_text(errors="replace").splitlines() if "Traceback" in line]
    too_long = between["p99_s"] > 2 * MAX_STALL_S
    report = {
        "soak_s": seconds,
        "answers": dict(sorted(tally.answers.items())),
        "failures": tally.failures[:10],
        "tracebacks": len(problems),
        "lives": lives,
        "grown": grown,
        "gaps": between,
        "gaps_bound_s": 2 * MAX_STALL_S,
        "ready": ready,
    }
    print(json.dumps(report, indent=1))
    return int(bool(grown or tally.failures or problems or too_long))


if __name__ == "__main__":
    sys.exit(main())
