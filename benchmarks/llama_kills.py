"""Turns of mixed agents at a real llama-server with random kills, each compared with llama-server's own.

    python -m benchmarks llama-kills MODEL.gguf --turns 1000 --seed 0

More agents than slots talk, some at once; they are forked, rewound, offloaded, purged, and their histories cut
without a word. Rekindle, its llama-server or both are killed between turns and during them. A second llama-server,
which nobody kills, gets the same ids.

Before that its own noise is measured: how far the log probabilities of a reply are apart that was computed from the
same ids in another slot, after another beginning, or in company. A reply that is farther apart than that is wrong. With
`-ub 1`, the default here, each token is computed alone and there is no noise: every log probability has to be the same
to its last digit. Rows are the same f16 as without it.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.llama_slots import SYSTEM, Fronted, Plain, Refused, SlotsBench, post
from rekindle.errors import RequestFailed

ROUNDING = 2e-6  # of a log probability on its way
NUM_TOP = 5  # with another number llama-server adds up its probabilities in another order, which shows at 2e-5
RETRY_S, MOST_RETRIES_S = 0.3, 200.0
KILL_SHARE = 0.06
MOST_ENDS = 2  # of llama-server in one life of Rekindle: the pauses before it is started again grow
COLD_EVERY = 25  # turns of the reference that it also computes from the beginning
NUM_PROBES = 4
IN_COMPANY = "in company"
WORDS = "lamp harbour tide keeper oil wick north quay fog bell ledger rope barge signal crew storm glass ice".split()


@dataclass(frozen=True, slots=True)
class KillsBench:
    """What is run: `turns` at these slots, or as many as `minutes` allow, of at most `at_once` agents at once."""

    slots: SlotsBench
    turns: int = 1000
    seed: int = 0
    minutes: float = 600.0
    at_once: int = 3


@dataclass(frozen=True, slots=True)
class Scored:
    """A reply: its ids and their log probabilities, None where a stream left one out; of the reference also those of
    the likeliest tokens at each place. `computed` tokens of its prompt were."""

    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    computed: int
    top: tuple[dict[int, float], ...] = ()

    def distance(self, reference: Scored) -> float:
        """The largest difference of log probabilities up to the first token that differs, that one included."""
        most = 0.0
        for at, (token, score) in enumerate(zip(self.ids, self.logprobs, strict=True)):
            if at >= len(reference.ids):
                return float("inf")
            if score is not None:
                most = max(most, abs(score - reference.top[at].get(token, float("-inf"))))
            if token != reference.ids[at]:
                return most if score is not None else float("inf")
        return most if len(self.ids) == len(reference.ids) else float("inf")


def own_reply(plain: Plain, ids: Sequence[int], most: int, **options: Any) -> Scored:
    """llama-server's own reply to these ids."""
    body = {"prompt": list(ids), "n_predict": most, "temperature": 0, "return_tokens": True, "n_probs": NUM_TOP}
    found = post(f"{plain.url}/completion", {**body, "ignore_eos": True, **options})
    scores = found["completion_probabilities"]
    tops = tuple({each["id"]: each["logprob"] for each in entry["top_logprobs"]} for entry in scores)
    logprobs = tuple(entry["logprob"] for entry in scores)
    return Scored(tuple(entry["id"] for entry in scores), logprobs, int(found["timings"]["prompt_n"]), tops)


def fronted_reply(front: Fronted, agent: str, ids: Sequence[int], most: int) -> Scored:
    """The reply that comes through Rekindle."""
    body = {"prompt": list(ids), "max_tokens": most, "temperature": 0, "ignore_eos": True, "logprobs": NUM_TOP}
    answer = post(f"{front.url}/v1/completions", {**body, "rekindle": {"return_ids": True}}, **{"X-Agent-ID": agent})
    report, scores = answer["rekindle"], answer["choices"][0]["logprobs"]["token_logprobs"]
    computed = report["prompt_tokens"] - report["reused_tokens"]
    return Scored(tuple(report["completion_ids"]), tuple(scores), computed)


# Noise


def noise(bench: SlotsBench, folder: Path) -> dict[str, tuple[int, float]]:
    """Of NUM_PROBES prompts: how many replies differ from a cold one in slot 0, and the largest distance, by how else
    they were computed. `slots` must be four."""
    plain, found = Plain(bench, folder / "noise.log"), dict[str, list[Scored]]()
    cold = list[Scored]()
    plain.start()
    try:
        for number in range(NUM_PROBES):
            ids = plain.tokens(f"{SYSTEM}{sentence(Random(number), 60)}")[: 110 + 17 * number]
            cold.append(own_reply(plain, ids, bench.reply, id_slot=0, cache_prompt=False))
            for how, reply in _otherwise(plain, ids, bench.reply, 40 + 9 * number).items():
                found.setdefault(how, []).append(reply)
    finally:
        plain.end()
    return {
        how: (
            sum(reply.ids != first.ids for reply, first in zip(replies, cold, strict=True)),
            max(reply.distance(first) for reply, first in zip(replies, cold, strict=True)),
        )
        for how, replies in found.items()
    }


def _otherwise(plain: Plain, ids: list[int], most: int, begun: int) -> dict[str, Scored]:
    """The replies to the same ids: in another slot; after all but the last `begun`, or five, of them were there before;
    while two other slots compute."""
    found = {"in another slot": own_reply(plain, ids, most, id_slot=1, cache_prompt=False)}
    for how, first in (("extended", len(ids) - begun), ("extended late", len(ids) - 5)):
        own_reply(plain, ids[:first], 1, id_slot=2, cache_prompt=False)
        found[how] = own_reply(plain, ids, most, id_slot=2)
    with ThreadPoolExecutor(2) as others:
        running = [
            others.submit(own_reply, plain, ids[at:50], 2 * most, id_slot=2 + at, cache_prompt=False) for at in range(2)
        ]
        found[IN_COMPANY] = own_reply(plain, ids, most, id_slot=1, cache_prompt=False)
        for each in running:
            each.result()
    return found


def sentence(random: Random, count: int) -> str:
    """So many random words."""
    return " ".join(random.choices(WORDS, k=count)).capitalize() + "."


# Turns


@dataclass
class Counts:
    """What happened, and what was compared."""

    events: Counter[str] = field(default_factory=Counter)
    equal: int = 0
    within_noise: int = 0
    wrong: list[str] = field(default_factory=list)
    farthest: float = 0.0
    prompt: int = 0
    computed: int = 0
    own_computed: int = 0
    cold_farthest: float = 0.0


class Turns:
    """Agents with their histories, in front of both servers; `band` is the distance that noise explains."""

    def __init__(self, front: Fronted, plain: Plain, options: KillsBench, band: float) -> None:
        self.counts = Counts()
        self._front = front
        self._plain = plain
        self._options = options
        self._bench = options.slots
        self._random = Random(options.seed)
        self._band = band
        self._system = plain.tokens(SYSTEM)
        self._lines = [plain.tokens(f" {sentence(self._random, 4 + at % 16)}") for at in range(200)]
        self._histories: dict[str, list[list[int]]] = {}  # the ids after each turn
        self._num_named = 0
        self._num_ended = 0  # llama-servers of this life
        for _ in range(self._bench.agents):
            self._new_agent()

    def _new_agent(self) -> str:
        self._num_named += 1
        self._histories[name := f"agent-{self._num_named}"] = []
        return name

    def run(self, say: Callable[[str], None]) -> None:
        """Take all turns."""
        end = time.monotonic() + 60 * self._options.minutes
        while (done := self.counts.events["turns"]) < self._options.turns and time.monotonic() < end:
            at_once = self._random.choices((1, 2, 3), (6, 3, 2))[0]
            agents = self._random.sample(sorted(self._histories), min(at_once, self._options.at_once))
            resting = [each for each in self._histories if each not in agents]
            prompts = {agent: self._prompt(agent) for agent in [self._changed(each, resting) for each in agents]}
            self._turn(prompts, self._kill() if self._random.random() < KILL_SHARE else None)
            if done // 50 != self.counts.events["turns"] // 50:
                say(f"{self.counts.events['turns']} turns, {len(self.counts.wrong)} wrong, {dict(self.counts.events)}")

    def _changed(self, agent: str, resting: list[str]) -> str:
        """Do something to an agent that is about to talk, or nothing; return who talks then. A fork takes the place of
        one of those who rest."""
        history, random = self._histories[agent], self._random
        what = random.choices(("talk", "fork", "rewind", "cut", "purge", "offload"), (70, 8, 7, 6, 3, 6))[0]
        if not history or what == "talk":
            return agent
        self.counts.events[what] += 1
        if what == "fork":
            left, forked = resting.pop(random.randrange(len(resting))), self._new_agent()
            self._ask("POST", f"{agent}/fork", {"target": forked})
            self._histories[forked] = [list(each) for each in history]
            del self._histories[left]
            self._ask("DELETE", left, None)
            return forked
        if what == "rewind":
            self._ask("POST", f"{agent}/rewind", {"turns": 1})
            history.pop()
        elif what == "cut":
            history.append(history[-1][: random.randrange(1, len(history[-1]))])
        elif what == "purge":
            self._ask("POST", f"{agent}/purge", None)
            history.clear()
        else:
            self._ask("POST", f"{agent}/offload", None)
        return agent

    def _ask(self, method: str, path: str, body: Any) -> None:
        """A route of an agent, which may have lost turns, or itself, that were not durable when Rekindle was killed."""
        answer = httpx.request(method, f"{self._front.url}/v1/agents/{path}", json=body, timeout=MOST_RETRIES_S)
        if not (answer.is_success or answer.status_code in (400, 404, 409, 503)):
            raise RequestFailed(f"{method} {path}: {answer.status_code} {answer.text}")
        if not answer.is_success:
            self.counts.events[f"{answer.status_code} of routes"] += 1

    def _prompt(self, agent: str) -> list[int]:
        history, random = self._histories[agent], self._random
        more = random.choice(self._lines)
        room = self._bench.context - self._bench.reply - len(more)
        if history and len(history[-1]) < room:
            return [*history[-1], *more]
        history.clear()
        notes = [token for line in random.choices(self._lines, k=random.randrange(3, 10)) for token in line]
        return [*self._system, *notes, *more][: self._bench.context // 2]

    def _kill(self) -> str:
        """Which one is killed, and when."""
        which = self._random.choice(("llama-server", "rekindle", "both"))
        if which == "llama-server" and self._num_ended >= MOST_ENDS:
            which = "both"
        self._num_ended = self._num_ended + 1 if which == "llama-server" else 0
        when = self._random.choice(("before", "rested", "during"))
        self.counts.events[f"{which} killed, {when}"] += 1
        if when == "during":
            return which
        if when == "rested":
            time.sleep(0.5)
        self._front.kill(which)
        return ""

    def _turn(self, prompts: dict[str, list[int]], kill: str | None) -> None:
        """One turn of each of these agents at once, something killed meanwhile, and llama-server's own replies."""
        with ThreadPoolExecutor(len(prompts) + 1) as threads:
            asked = {agent: threads.submit(self._reply, agent, ids) for agent, ids in prompts.items()}
            if kill:
                time.sleep(self._random.uniform(0, 0.6))
                threads.submit(self._front.kill, kill).result()
            replies = {agent: each.result() for agent, each in asked.items()}
        for agent, ids in prompts.items():
            self._compare(agent, ids, replies[agent])
            self._histories[agent].append([*ids, *replies[agent].ids])

    def _reply(self, agent: str, ids: list[int]) -> Scored:
        """The reply through Rekindle, asked for again while it or llama-server is started again."""
        end = time.monotonic() + MOST_RETRIES_S
        while True:
            try:
                return fronted_reply(self._front, agent, ids, self._bench.reply)
            except Refused as error:
                if error.status < 500 or time.monotonic() > end:
                    raise
            except httpx.HTTPError:
                if time.monotonic() > end:
                    raise
            self.counts.events["asked again"] += 1
            time.sleep(RETRY_S)

    def _compare(self, agent: str, ids: list[int], reply: Scored) -> None:
        counts = self.counts
        own = own_reply(self._plain, ids, self._bench.reply)
        if counts.events["turns"] % COLD_EVERY == 0:
            cold = own_reply(self._plain, ids, self._bench.reply, cache_prompt=False)
            counts.cold_farthest = max(counts.cold_farthest, cold.distance(own))
        distance = reply.distance(own)
        counts.farthest = max(counts.farthest, distance)
        counts.events["turns"] += 1
        counts.prompt += len(ids)
        counts.computed += reply.computed
        counts.own_computed += own.computed
        if distance > self._band:
            turn = f"turn {counts.events['turns']} of {agent}: {len(ids)} tokens, {reply.computed} computed"
            counts.wrong.append(f"{turn}, log probabilities differ by {distance:.6f}")
        elif reply.ids == own.ids:
            counts.equal += 1
        else:
            counts.within_noise += 1


def run_kills_bench(options: KillsBench, console: Console) -> int:
    """Measure noise, take the turns, print what happened; return 1 if a reply was wrong."""
    bench = options.slots
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as name:
        folder = Path(name)
        usual = " ".join(bench.flags.replace("-ub 1", "").split())
        found = {
            flags: noise(replace(bench, flags=flags, slots=4), folder) for flags in dict.fromkeys((usual, bench.flags))
        }
        console.print(_noise_table(found))
        alone = options.at_once == 1
        band = max(far for how, (_, far) in found[bench.flags].items() if not (alone and how == IN_COMPANY)) + ROUNDING
        front = Fronted(bench, folder / "rekindle.log", folder / "store")
        plain = Plain(replace(bench, flags=f"{bench.flags} --cache-ram 1024"), folder / "plain.log")
        try:
            front.start()
            plain.start()
            made = Turns(front, plain, options, band)
            made.run(console.print)
        finally:
            front.end()
            plain.end()
    return _report(made.counts, options, band, console)


def _report(counts: Counts, options: KillsBench, band: float, console: Console) -> int:
    """Print what happened; return 1 if a reply was wrong."""
    events = ", ".join(f"{name} {count}" for name, count in sorted(counts.events.items()))
    console.print(f"{options.slots.agents} agents, {options.slots.slots} slots, seed {options.seed}: {events}")
    console.print(
        f"{counts.equal} replies equal to llama-server's own, {counts.within_noise} others within its noise of "
        f"{band:.6f}, {len(counts.wrong)} wrong; largest distance {counts.farthest:.6f}, of llama-server's own replies "
        f"computed from the beginning {counts.cold_farthest:.6f}"
    )
    console.print(
        f"{counts.prompt:,} prompt tokens, {counts.computed:,} computed; by the llama-server that was never killed "
        f"{counts.own_computed:,}"
    )
    for each in counts.wrong:
        console.print(f"wrong: {each}")
    return int(bool(counts.wrong))


def _noise_table(found: dict[str, dict[str, tuple[int, float]]]) -> Table:
    table = Table("flags", "the same ids", "other tokens", "log probabilities apart, at most")
    for flags, kinds in found.items():
        for how, (num_other, far) in kinds.items():
            table.add_row(flags, how, f"{num_other} of {NUM_PROBES}", f"{far:.6f}")
    return table
