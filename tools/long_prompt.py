"""Measure a long prompt on a model of realistic size: time, memory, a cancel half way, and the next turn.

    python tools/long_prompt.py /tmp/model --tokens 32000 --threads 2

Prints, in seconds and MiB: the cold prompt, cancelled half way and repeated (only the rest is computed), the next
turn, and how far resident memory rose above the hot blocks themselves.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time

from rekindle import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.model.params import SamplingParams
from rekindle.text.messages import normalise_messages
from rekindle_lab.bench.distinct import Distinct
from rekindle_lab.bench.memory import forget_peak, peak_bytes, resident_bytes

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("rekindle.engine").setLevel(logging.INFO)
    with (
        tempfile.TemporaryDirectory(prefix="rekindle-long-") as store,
        Engine.from_pretrained(arguments.model, threads=arguments.threads, store=store) as engine,
    ):
        measure(engine, Distinct(engine.encoder, tokens=arguments.tokens, seed=0))


def measure(engine: Engine, texts: Distinct) -> None:
    """Run and print all measurements."""
    messages = texts.messages(1)
    before = resident_bytes()
    forget_peak()
    began = time.perf_counter()
    generation = engine.submit(request(messages))
    while (progress := generation.progress) is None or progress.computed_tokens < progress.prompt_tokens // 2:
        time.sleep(0.05)
    generation.cancel()
    generation.result()
    half_s = time.perf_counter() - began
    began = time.perf_counter()
    report = engine.submit(request(messages)).result().report
    rest_s = time.perf_counter() - began
    rise, kv = peak_bytes() - before, engine.agent("long").info().num_tokens * bytes_per_token(engine)
    print(f"{report.prompt_tokens:,} tokens: cancelled after {progress.computed_tokens:,} and {half_s:.1f} s;")
    print(f"repeated: {report.outcome}, reused {report.reused_tokens:,}, the rest and one token in {rest_s:.1f} s")
    print(
        f"peak of resident memory: {rise / MIB:,.0f} MiB above the start, of which {kv / MIB:,.0f} MiB are hot blocks"
    )
    answer = {"role": "assistant", "content": "It is where it was."}
    began = time.perf_counter()
    again = engine.submit(request([*messages, answer, {"role": "user", "content": "And where is that?"}])).result()
    print(f"next turn: {again.report.outcome}, reused {again.report.reused_tokens:,} of {again.report.prompt_tokens:,}")
    print(f"in {time.perf_counter() - began:.2f} s")


def request(messages: list[dict[str, str]]) -> GenerationRequest:
    """Build a greedy request for one token."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    return GenerationRequest(messages=normalise_messages(messages), agent="long", params=params)


def bytes_per_token(engine: Engine) -> float:
    """Return bytes of KV per token, over all parts."""
    layout = engine.spec.layout
    return sum(part.payload_bytes for part in layout.parts) / layout.block_tokens


if __name__ == "__main__":
    main()
