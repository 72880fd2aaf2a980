"""Faults in what was written of llama-server's slots: every one is noticed, and what it hit is computed.

    python -m benchmarks llama-faults MODEL.gguf --faults 1000 --seed 0

Agents take turns at one slot, so that each turn is restored. Before a turn hot memory is emptied and the files of
records are hurt: a bit flipped, a run of noise or of zeros, a file cut off, two records exchanged, an older one put
back. Log probabilities of the reply have to be those of a llama-server of its own, as far as its noise goes (see
`llama_kills`), and the process of llama-server has to be the one that was started.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
from rich.console import Console

from benchmarks.llama_kills import IN_COMPANY, ROUNDING, Scored, fronted_reply, noise, own_reply, sentence
from benchmarks.llama_slots import SYSTEM, Fronted, Plain, SlotsBench, shard_header
from rekindle.errors import RequestFailed
from rekindle.store.files.records import PAGE

KINDS = ("flip", "noise", "zeros", "cut", "exchange", "stale")
LONGEST_RUN = 6000  # bytes
MOST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Record:
    """The place of a slot that is in use in a file of records."""

    path: Path
    begin: int
    num_bytes: int

    def read(self) -> bytes:
        """Its bytes now."""
        with self.path.open("rb") as file:
            file.seek(self.begin)
            return file.read(self.num_bytes)

    def write(self, content: bytes, at: int = 0) -> None:
        """Write these bytes from `at` on."""
        with self.path.open("r+b") as file:
            file.seek(self.begin + at)
            file.write(content)


def records(store: Path) -> list[Record]:
    """The slots of all files of records that have anything in them."""
    found = list[Record]()
    for path in sorted(store.rglob("blocks-*.safetensors")):
        num_slots, num_bytes = shard_header(path)["blocks"]["shape"]
        with path.open("rb") as file:
            num_header = 8 + int.from_bytes(file.read(8), "little")
        for number in range(num_slots):
            record = Record(path, num_header + number * num_bytes, num_bytes)
            if record.begin < path.stat().st_size and any(record.read()[:PAGE]):
                found.append(record)
    return found


@dataclass
class Faults:
    """Hurts records, `a_turn` times before each; `older` has what they were at other times."""

    random: Random
    a_turn: int = 4
    older: dict[Record, bytes] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)

    def hurt(self, found: Sequence[Record]) -> None:
        """Do one of the faults to one of these records, or two."""
        kind, record = self.random.choice(KINDS), self.random.choice(found)
        content, at = record.read(), self.random.randrange(record.num_bytes)
        length = 1 if kind == "flip" else min(self.random.randint(1, LONGEST_RUN), record.num_bytes - at)
        other = self.random.choice(found)
        if kind == "flip" and at < len(content):
            record.write(bytes([content[at] ^ 1 << self.random.randrange(8)]), at)
        elif kind == "noise":
            record.write(self.random.randbytes(length), at)
        elif kind == "zeros":
            record.write(bytes(length), at)
        elif kind == "cut":
            os.truncate(record.path, record.begin + at)
        elif kind == "exchange" and other.num_bytes == record.num_bytes:
            before = other.read()
            other.write(content)
            record.write(before)
        elif kind == "stale" and self.older.get(record, content) != content:
            record.write(self.older[record])
        else:
            return self.hurt(found)
        self.older.setdefault(record, content)
        self.done[kind] += 1
        return None


@dataclass
class FaultyTurns:
    """Agents at one slot, in front of files that are hurt."""

    front: Fronted
    plain: Plain
    bench: SlotsBench
    faults: Faults
    band: float
    histories: dict[str, list[int]] = field(default_factory=dict)
    turns: int = 0
    wrong: list[str] = field(default_factory=list)
    farthest: float = 0.0
    prompt: int = 0
    computed: int = 0

    def run(self, num_faults: int, end: float, say: Callable[[str], None]) -> None:
        """Do so many faults, or those until this time of the monotonic clock."""
        while (done := self.faults.done.total()) < num_faults and time.monotonic() < end:
            agent = f"agent-{self.turns % self.bench.agents}"
            if agent in self.histories:
                self._hurt()
            self._turn(agent)
            if done // 100 != self.faults.done.total() // 100:
                say(f"{self.faults.done.total()} faults, {self.turns} turns, {len(self.wrong)} wrong")

    def _hurt(self) -> None:
        """Have everything written and hot memory emptied, then hurt the files."""
        for agent in self.histories:
            self._offload(agent)
        found = records(self.front.store)
        for _ in range(self.faults.a_turn if found else 0):
            self.faults.hurt(found)

    def _offload(self, agent: str) -> None:
        """Ask until it is done: what was hurt may have to be written again first."""
        end = time.monotonic() + MOST_WAIT_S
        while not (answer := self._asked(agent)).is_success:
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > end:
                raise RequestFailed(f"offload of {agent}: {answer.status_code} {answer.text}")
            time.sleep(0.1)

    def _asked(self, agent: str) -> httpx.Response:
        return httpx.post(f"{self.front.url}/v1/agents/{agent}/offload", timeout=MOST_WAIT_S)

    def _turn(self, agent: str) -> None:
        random, before = self.faults.random, self.histories.get(agent, [])
        more = self.plain.tokens(f" {sentence(random, 6)}")
        if not before or len(before) + len(more) + self.bench.reply >= self.bench.context:
            before = self.plain.tokens(f"{SYSTEM}{agent} {self.turns}: {sentence(random, 40)}")
        ids = [*before, *more]
        reply = fronted_reply(self.front, agent, ids, self.bench.reply)
        own = own_reply(self.plain, ids, self.bench.reply)
        self._compare(agent, ids, reply, own)
        self.histories[agent] = [*ids, *reply.ids]

    def _compare(self, agent: str, ids: list[int], reply: Scored, own: Scored) -> None:
        self.turns += 1
        distance = reply.distance(own)
        self.farthest = max(self.farthest, distance)
        self.prompt += len(ids)
        self.computed += reply.computed
        if distance > self.band:
            what = f"turn {self.turns} of {agent}: {len(ids)} tokens, {reply.computed} computed"
            self.wrong.append(f"{what}, log probabilities differ by {distance:.6f}")


def run_faults_bench(bench: SlotsBench, num_faults: int, faults: Faults, minutes: float, console: Console) -> int:
    """Hurt the files, print what came of it; return 1 if a reply was wrong or llama-server was started again."""
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as name:
        folder = Path(name)
        band = max(far for how, (_, far) in noise(replace(bench, slots=4), folder).items() if how != IN_COMPANY)
        front, plain = Fronted(bench, folder / "rekindle.log", folder / "store"), Plain(bench, folder / "plain.log")
        try:
            front.start()
            plain.start()
            before = front.llama_pids()
            made = FaultyTurns(front, plain, bench, faults, band + ROUNDING)
            made.run(num_faults, time.monotonic() + 60 * minutes, console.print)
            after = front.llama_pids()
            store: dict[str, Any] = httpx.get(f"{front.url}/v1/stats", timeout=MOST_WAIT_S).json()["store"]
        finally:
            front.end()
            plain.end()
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(made.faults.done.items()))
    same = "the same process" if before == after else f"process {after}, before {before}"
    console.print(f"{made.faults.done.total()} faults ({kinds}), {made.turns} turns of {bench.agents} agents")
    console.print(
        f"{made.turns - len(made.wrong)} replies equal to llama-server's own within {made.band:.6f}, "
        f"{len(made.wrong)} wrong, largest distance {made.farthest:.6f}; llama-server is {same}"
    )
    console.print(
        f"{store['bad_records']} records found bad; {made.prompt:,} prompt tokens, {made.computed:,} of them computed"
    )
    for each in made.wrong:
        console.print(f"wrong: {each}")
    return int(bool(made.wrong) or before != after)
