"""`python -m benchmarks structured [MODEL]`: replies of random schemas, whether each is valid, and what masks cost.

    python -m benchmarks structured --schemas 1000

Each schema is random, with a prompt of its own, half of them greedy; replies are checked by a JSON schema validator
that the server does not use. The share of masks is measured in batches of 1 and 8 replies of one schema, as the time
inside the matchers by that of the engine's steps. It needs `jsonschema-rs`, which the tests bring along.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs
from rich.console import Console
from rich.table import Table

from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.errors import ConfigError
from rekindle.model.params import SamplingParams
from rekindle.text.constraints.matcher import ReplyMatcher
from rekindle.text.constraints.types import Constraint
from rekindle_lab.bench.workload import WORDS
from rekindle_lab.record import Measurement, Origin, deliver

ARM = "rekindle"
NAMES = sorted(set(WORDS))
MOST_TOKENS = 1500
BATCH = 16
FORMATS = ("date", "uuid", "ipv4")


@dataclass(frozen=True, slots=True)
class StructuredBench:
    """How many schemas; `out` None prints the JSON lines after the table."""

    schemas: int = 1000
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.schemas < 1:
            raise ConfigError("give at least one schema")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema whose strings and lists are bounded, so that any model comes to the end of a reply."""
    leaves = (_string, _number, _constant)
    nodes = (_object, _object, _array, _union)
    return rng.choice(leaves if depth > 2 else nodes if not depth else (*leaves, *nodes))(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "format": rng.choice(FORMATS)}
    if kind == 1:
        return {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^[0-9]{3}-[A-F]$", "^(on|off)$"])}
    return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 12)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-50, 50)
    # Other numbers have digits without end.
    kind: dict[str, Any] = rng.choice([{"type": "integer"}, {"type": "number", "multipleOf": 0.5}])
    return {**kind, "minimum": low, "maximum": low + rng.randrange(1, 500)}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = [None, True, 7, -1.5, *rng.sample(NAMES, 3)]
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"enum": rng.sample(values, 3)}, {"const": values[4]}])


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(1, 5))
    properties = {name: random_schema(rng, depth + 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(3)
    return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": least, "maxItems": least + 2}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randrange(2, 4))]}


def _request(number: int, schema: dict[str, Any], rng: random.Random, **sampling: Any) -> GenerationRequest:
    text = f"{' '.join(rng.choices(WORDS, k=20))}. Answer {number} in JSON: "
    params = SamplingParams(max_tokens=MOST_TOKENS, **sampling)
    return GenerationRequest(text=text, constraint=Constraint("json", schema), params=params, reuse="off")


def check_replies(engine: Engine, options: StructuredBench) -> list[Measurement]:
    """Return how many replies were valid, cut off and invalid."""
    rng = random.Random(options.seed)
    schemas = [random_schema(rng) for _ in range(options.schemas)]
    counts = {"valid": 0, "cut off": 0, "invalid": 0}
    for first in range(0, len(schemas), BATCH):
        batch = schemas[first : first + BATCH]
        sampling = [{"temperature": float((first + at) % 2), "seed": first + at} for at in range(len(batch))]
        requests = [_request(first + at, schema, rng, **sampling[at]) for at, schema in enumerate(batch)]
        generations = [engine.submit(request) for request in requests]
        for schema, generation in zip(batch, generations, strict=True):
            result = generation.result()
            counts["cut off" if result.finish_reason == "length" else _verdict(schema, result.text)] += 1
    return [Measurement(f"replies {name}", ARM, "replies", (float(num),)) for name, num in counts.items()]


def _verdict(schema: dict[str, Any], text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return "invalid"
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    return "valid" if validator.is_valid(value) else "invalid"


@contextmanager
def _timed_matchers() -> Iterator[list[float]]:
    """Yield a list with the seconds spent in matchers while the block runs."""
    spent = [0.0]
    methods = {name: getattr(ReplyMatcher, name) for name in ("allowed", "take")}

    def timed(method: Any) -> Any:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    for name, method in methods.items():
        setattr(ReplyMatcher, name, timed(method))
    try:
        yield spent
    finally:
        for name, method in methods.items():
            setattr(ReplyMatcher, name, method)


def share_of_masks(engine: Engine, streams: int, seed: int) -> Measurement:
    """Return the share of the matchers in the time of decoding, in per cent."""
    rng = random.Random(seed)
    item = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 40}, "n": {"type": "integer"}}}
    schema = {"type": "array", "items": {**item, "required": ["name", "n"]}, "minItems": 8, "maxItems": 8}
    values = []
    for turn in range(5):
        requests = [_request(turn, schema, rng, temperature=1.0, seed=turn) for _ in range(streams)]
        with _timed_matchers() as spent:
            began = time.perf_counter()
            for generation in [engine.submit(request) for request in requests]:
                generation.result()
            values.append(100 * spent[0] / (time.perf_counter() - began))
    return Measurement(f"masks, {streams} replies at once", ARM, "%", tuple(values))


def run_structured_bench(settings: Settings, options: StructuredBench, console: Console) -> int:
    """Run the bench; exit code 1 if a reply was invalid."""
    with Engine(settings) as engine:
        measured = check_replies(engine, options)
        measured += [share_of_masks(engine, streams, options.seed) for streams in (1, 8)]
    deliver(measured, Origin.here("structured", {**asdict(options), "out": None}), options.out, console)
    table = Table("measure", "median")
    for each in measured:
        table.add_row(each.measure, f"{each.median:.1f} {each.unit}")
    console.print(table)
    return 1 if any(each.measure == "replies invalid" and each.median for each in measured) else 0
