"""Arms of `rekindle bench server` with many requests at once: parallel streams, staggered arrivals, agents' rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rekindle_lab.bench.replay.client import Answer, inter_token
from rekindle_lab.bench.replay.table import nearest_rank
from rekindle_lab.bench.server.arms import Bench
from rekindle_lab.bench.server.texts import Messages, message
from rekindle_lab.record import Measurement

NUM_STREAMS = (1, 4, 8)
STREAM_PROMPT_TOKENS = 64
DECODE_TOKENS = 64
APART_S = 0.25  # between arrivals
SPEAKERS = ("Alice", "Bob", "Carla", "Dmitri")
ROUNDS = 3


def batches(bench: Bench, end_token: int | None) -> Iterator[Measurement]:
    """Measure a batch's tokens per second, overall and while all streams decode, and the p99 time between tokens."""
    for count in NUM_STREAMS:
        rates, totals, gaps = [], [], []
        for repeat in range(bench.repeats):
            prompts = [
                [message("user", bench.texts.text(STREAM_PROMPT_TOKENS, f"{count} {repeat} {i}"))] for i in range(count)
            ]
            answers = side_by_side(bench, prompts, f"batch-{count}-{repeat}", 0.0, full_length(end_token))
            rates += rate_of(answers)
            totals.append(total_rate(answers))
            gaps += [nearest_rank(found, 0.99)] if (found := inter_token([a for _, a in answers])) else []
        detail = {"streams": count, "reply_tokens": [answer.completion_tokens for _, answer in answers]}
        yield Measurement(f"batch of {count}, to its last token", bench.arm, "tok/s", tuple(totals), detail)
        if rates:
            yield Measurement(f"decode, {count} streams", bench.arm, "tok/s", tuple(rates), detail)
        if gaps:
            yield Measurement(f"between tokens, p99, {count} streams", bench.arm, "s", tuple(gaps), detail)


def full_length(end_token: int | None) -> dict[str, Any]:
    """Return parameters that keep a reply from ending early, by banning the end token if its id is known."""
    return {} if end_token is None else {"logit_bias": {str(end_token): -100}}


def side_by_side(
    bench: Bench, prompts: Sequence[Messages], name: str, apart_s: float, more: dict[str, Any]
) -> list[tuple[float, Answer]]:
    """Send each prompt in its own thread, `apart_s` after one another; return (second it was sent, answer)."""
    began = time.perf_counter()

    def ask(number: int) -> tuple[float, Answer]:
        time.sleep(number * apart_s)
        sent_s = time.perf_counter() - began
        return sent_s, bench.ask(f"{name}-{number}", prompts[number], DECODE_TOKENS, **more)

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(ask, range(len(prompts))))


def rate_of(answers: Sequence[tuple[float, Answer]]) -> list[float]:
    """Return tokens per second from the last stream's first token to the first stream's last; none without overlap.

    Chunks are counted and weighted by the server's token counts.
    """
    streams = [(sent_s, answer) for sent_s, answer in answers if answer.token_s]
    if len(streams) < len(answers):
        return []
    begin = max(sent_s + answer.token_s[0] for sent_s, answer in streams)
    end = min(sent_s + answer.token_s[-1] for sent_s, answer in streams)
    if begin >= end:
        return []
    num_tokens = 0.0
    for sent_s, answer in streams:
        weight = (answer.completion_tokens or len(answer.token_s)) / len(answer.token_s)
        num_tokens += weight * sum(begin < sent_s + at <= end for at in answer.token_s)
    return [num_tokens / (end - begin)]


def total_rate(answers: Sequence[tuple[float, Answer]]) -> float:
    """Return reply tokens per second from the first request sent to the last reply's end, prefill included."""
    num_tokens = sum(answer.completion_tokens or len(answer.token_s) for _, answer in answers)
    return num_tokens / max(sent_s + answer.total_s for sent_s, answer in answers)


def staggered(bench: Bench, end_token: int | None) -> Iterator[Measurement]:
    """Measure cold prompts of half the context that arrive while others decode: first tokens, and the longest stall."""
    firsts, stalls = [], []
    for repeat in range(bench.repeats):
        prompts = [[message("user", bench.texts.text(bench.context // 2, f"staggered {repeat} {i}"))] for i in range(4)]
        answers = side_by_side(bench, prompts, f"staggered-{repeat}", APART_S, full_length(end_token))
        firsts += [answer for _, answer in answers]
        gaps = inter_token([answer for _, answer in answers])
        stalls += [max(gaps)] if gaps else []
    detail = {"apart_s": APART_S, "arrivals": 4}
    yield bench.first_tokens("staggered arrivals", firsts, **detail)
    if stalls:
        yield Measurement("staggered arrivals, longest stall", bench.arm, "s", tuple(stalls), detail)


def rounds(bench: Bench) -> Iterator[Measurement]:
    """Measure four agents that talk, with a shared system prompt of half the context: first and later rounds.

    Every message enters each listener's conversation once, in order, attributed.
    """
    first: list[Answer] = []
    later: list[Answer] = []
    for repeat in range(bench.repeats):
        rules = bench.texts.text(bench.context // 2, f"rules {repeat}")
        system = {name: f"{rules}\n\nYou are {name}. Answer in one short sentence." for name in SPEAKERS}
        talks: dict[str, Messages] = {name: [message("system", text)] for name, text in system.items()}
        unheard: dict[str, list[str]] = {name: [] for name in SPEAKERS}
        for number in range(ROUNDS):
            for name in SPEAKERS:
                heard = "\n".join([*unheard[name], f"[{name}, respond now.]"])
                talks[name].append(message("user", heard))
                answer = bench.ask(f"round-{repeat}-{name}", talks[name])
                talks[name].append(answer.message)
                unheard[name] = []
                for other in SPEAKERS:
                    if other != name:
                        unheard[other].append(f"{name}: {' '.join(answer.text.split())}")
                (later if number else first).append(answer)
    yield bench.first_tokens("agents, first round", first)
    yield bench.first_tokens("agents, later rounds", later)
