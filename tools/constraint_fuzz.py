"""Attack constraints of replies: schemas, regexes and grammars that explode are refused, or followed in small steps.

    python -m tools.constraint_fuzz --runs 300
    python -m tools.constraint_fuzz --runs 1 --seed 17     # one random constraint again

First the written cases, then random ones: schemas whose keywords have hostile values, nested regexes with counts, and
grammars in both notations whose rules call each other at random. Each is compiled as a server does it, in bounded
processes first, and a reply is followed for `STEPS` tokens, drawn from those that are allowed. Measured is processor
time of this thread, which in a server others wait for: while it compiles, at most `MOST_S`, and for each token, at most
`MOST_STEP_S`. Prints a JSON report; exit code 1 if anything took longer, or ended in anything but a refusal or a reply.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rekindle import pocket
from rekindle.errors import BadRequest
from rekindle.model.described import DescribedModel
from rekindle.text.constraints.matcher import ReplyConstraints
from rekindle.text.constraints.types import Constraint, Kind
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import find_reply_format
from tools.fuzz_command import run

MOST_S, MOST_STEP_S = 0.5, 0.25
STEPS = 200
GBNF = "root ::= "
DEEP = 150  # as deep as bodies may be


def nested(open_: str, inner: str, close: str, times: int) -> str:
    """A text inside so many pairs."""
    return open_ * times + inner + close * times


def deep_schema(key: str, depth: int) -> dict[str, Any]:
    """A schema inside a schema, and so on."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {key: [schema, schema] if key.endswith("Of") else schema}
    return schema


def chain(first: str, mark: str, count: int, *, twice: bool = True) -> str:
    """Rules of which each needs the next one, twice if so."""
    rules = (f"a{at}{mark}{f'a{at + 1} ' * twice}a{at + 1}" for at in range(count))
    return "\n".join([f"{first}{mark}a0", *rules, f'a{count}{mark}"x"'])


def defined(count: int, schema: Callable[[str], Any]) -> dict[str, Any]:
    """A schema of definitions of which each has a reference to the next one."""
    parts = {f"a{at}": schema(f"#/$defs/a{at + 1}") for at in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{count}": {"type": "null"}}}


def needing(reference: str) -> dict[str, Any]:
    """An object whose one property is required."""
    return {"type": "object", "required": ["x"], "properties": {"x": {"$ref": reference}}}


NAMES = [f"p{at}" for at in range(3000)]
LATE = "\n".join([f'start: "{"a" * 40}" s', "s: s s | t", "t: /(a|b|ab|ba)*c?/ t | /[ab]{0,200}/"])
CASES: dict[str, tuple[Kind, Any]] = {
    "regex, counts of counts": ("regex", "((a{1000}){1000}){1000}"),
    "regex, alternatives twice": ("regex", "(a|aa|aaa)*(a|aa|aaa)*" * 50),
    "regex, nested stars": ("regex", nested("(", "a", ")*", 500)),
    "regex, brackets": ("regex", nested("(", "a", ")", 100_000)),
    "regex, a million letters": ("regex", "a" * 1_000_000),
    "regex, classes": ("regex", "[\\u0000-\\U0010ffff]{0,5000}" * 20),
    "regex, all of Unicode twice": ("regex", "(\\p{L}|\\p{N}|\\w)*(\\p{L}\\w){1,400}"),
    "regex, look-ahead": ("regex", "(?=a)(?!b)a"),
    "regex, back-reference": ("regex", "(a*)\\1"),
    "regex, and not": ("regex", "~(a{500}b{500}) & (.*a){50}"),
    "regex, end with a backslash": ("regex", "abc\\"),
    "regex, a slash": ("regex", "/ & start: /"),
    "regex, surrogate": ("regex", "\ud800"),
    "regex, late": ("regex", "a{40}(b|bb|bbb)*(.*b.*){30}"),
    "choices, 100,000": ("choice", tuple(f"c{at}" for at in range(100_000))),
    "choice of a megabyte": ("choice", ("x" * 1_000_000,)),
    "choices that begin alike": ("choice", tuple("a" * at for at in range(1, 1400))),
    "grammar, rules of itself": ("grammar", "start: start"),
    "grammar, left recursion": ("grammar", 'start: start start | start start start | "a" | ""'),
    "grammar, empty loop": ("grammar", 'start: a*\na: b*\nb: ""'),
    "grammar, late": ("grammar", LATE),
    "grammar, doubling": ("grammar", chain("start", ": ", 60)),
    "grammar, 50,000 rules": ("grammar", chain("start", ": ", 50_000, twice=False)),
    "grammar, import": ("grammar", "%import python.file_input\nstart: file_input"),
    "grammar, json inside": ("grammar", 'start: %json {"type": "integer", "multipleOf": 99999989}'),
    "grammar, of nothing": ("grammar", ""),
    "grammar, ignore": ("grammar", "start: /a+/\n%ignore /(a|b|aa)*/"),
    "GBNF, chain of 3,000": ("grammar", chain("root", " ::= ", 3000)),
    "GBNF, chain of 40": ("grammar", chain("root", " ::= ", 40)),
    "GBNF, an open text": ("grammar", f'{GBNF}"a\\'),
    "GBNF, an open class": ("grammar", f"{GBNF}[\\"),
    "GBNF, brackets": ("grammar", f'{GBNF}{"(" * 30_000}"a"{")" * 30_000}'),
    "GBNF, a count of 5,000 digits": ("grammar", f'{GBNF}"a"{{{"9" * 5000}}}'),
    "GBNF, a count of a billion": ("grammar", f'{GBNF}"a"{{1000000000}}'),
    "GBNF, no root": ("grammar", 'a ::= "b"'),
    "GBNF, a rule that is not there": ("grammar", f"{GBNF}nowhere"),
    "GBNF, a megabyte of comments": ("grammar", f'{GBNF}"a"\n' + "#\n" * 400_000),
    "schema, multiple of a prime": ("json", {"type": "integer", "multipleOf": 99_999_989}),
    "schema, multiple of almost nothing": ("json", {"type": "number", "multipleOf": 1e-300}),
    "schema, least items": ("json", {"type": "array", "minItems": 1 << 40, "items": {"type": "integer"}}),
    "schema, least letters": ("json", {"type": "string", "minLength": 1 << 40}),
    "schema, most letters": ("json", {"type": "string", "maxLength": 10_000_000}),
    "schema, bounds": ("json", {"type": "integer", "minimum": -(10**300), "maximum": 10**300}),
    "schema, bounds of a number": ("json", {"type": "number", "exclusiveMinimum": 1e-308, "maximum": 1.7e308}),
    "schema, anyOf in anyOf": ("json", deep_schema("anyOf", 14)),
    "schema, allOf in allOf": ("json", deep_schema("allOf", 14)),
    "schema, oneOf in oneOf": ("json", deep_schema("oneOf", 14)),
    "schema, items in items": ("json", deep_schema("items", DEEP)),
    "schema, not": ("json", {"not": {"not": {"type": "string"}}}),
    "schema, itself": ("json", {"$ref": "#"}),
    "schema, all of itself": ("json", {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}),
    "schema, refs in a ring": (
        "json",
        defined(500, lambda ref: {"$ref": "#/$defs/a0" if ref.endswith("a500") else ref}),
    ),
    "schema, refs that double": ("json", defined(60, lambda ref: {"anyOf": [{"$ref": ref}] * 2})),
    "schema, a ref outside": ("json", {"$ref": "file:///etc/passwd"}),
    "schema, a ref on the net": ("json", {"$ref": "http://127.0.0.1:1/x"}),
    "schema, refs that need each other": ("json", defined(2000, needing)),
    "schema, pattern": ("json", {"type": "string", "pattern": "^(a+)+$"}),
    "schema, patterns of names": ("json", {"patternProperties": {f"^(a|b){{{n}}}.*": {} for n in range(300)}}),
    "schema, names": ("json", {"required": NAMES, "properties": {name: {} for name in NAMES}}),
    "schema, optional names": ("json", {"properties": {name: {} for name in NAMES}, "minProperties": 1500}),
    "schema, unique": ("json", {"type": "array", "uniqueItems": True, "items": {"enum": list(range(2000))}}),
    "schema, x-guidance": ("json", {"type": "string", "x-guidance": {"whitespace_pattern": "((a{1000}){1000}){1000}"}}),
    "schema, a key of a megabyte": ("json", {"properties": {"k" * 1_000_000: {}}, "required": ["k" * 1_000_000]}),
    "schema, odd kinds": (
        "json",
        {"type": ["string", 3, None], "properties": 7, "items": "x", "enum": {}, "required": "a"},
    ),
}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a constraint ended, and what it took of this thread: to compile it, and for the slowest token."""

    case: str
    how: str
    says: str
    seconds: float
    step_s: float


def attempt(made: ReplyConstraints, case: str, constraint: Constraint, chance: random.Random) -> Ending:
    """Compile a constraint and follow a reply."""
    began, slowest = time.thread_time(), 0.0
    took = -1.0
    try:
        made.is_ready(constraint, opening="")
        matcher = made.matcher(constraint, opening="")
        took = time.thread_time() - began
        for _ in range(STEPS):
            before = time.thread_time()
            allowed = np.flatnonzero(matcher.allowed())
            slowest = max(slowest, time.thread_time() - before)
            if matcher.is_over or not len(allowed):
                break
            before = time.thread_time()
            matcher.take(int(allowed[chance.randrange(len(allowed))]))
            slowest = max(slowest, time.thread_time() - before)
        how, says = "followed", ""
    except BadRequest as error:
        how, says = "refused" if took < 0 else "stopped", str(error)
        slowest = slowest if took < 0 else max(slowest, time.thread_time() - before)
    except BaseException as error:  # a panic of a library in Rust is no Exception
        how, says = "defect", f"{type(error).__name__}: {error} {traceback.format_exc()[-600:]}"
    took = took if took >= 0 else time.thread_time() - began
    if how != "defect" and (took > MOST_S or slowest > MOST_STEP_S):
        how = "slow"
    return Ending(case, how, says, round(took, 3), round(slowest, 3))


def random_constraint(chance: random.Random) -> Constraint:
    """A constraint of any kind."""
    kind = chance.choice(("json", "regex", "gbnf", "lark"))
    if kind == "json":
        return Constraint("json", _schema(chance, 4))
    if kind == "regex":
        return Constraint("regex", _regex(chance, 5))
    rules = chance.randrange(2, 12)
    mark = " ::= " if kind == "gbnf" else ": "
    first = "root" if kind == "gbnf" else "start"
    names = [first, *(f"r{at}" for at in range(rules))]
    lines = [
        f"{name}{mark}{' | '.join(_terms(chance, names) for _ in range(chance.randrange(1, 4)))}" for name in names
    ]
    return Constraint("grammar", "\n".join(lines))


def _terms(chance: random.Random, names: list[str]) -> str:
    marks = ("", "", "", "*", "+", "?", "{2,30}")
    words = [*names, '"a"', '"b"', '""', '"ab"', "[a-c]" if names[0] == "root" else "/[a-c]+/"]
    return " ".join(f"{chance.choice(words)}{chance.choice(marks)}" for _ in range(chance.randrange(1, 4)))


def _regex(chance: random.Random, depth: int) -> str:
    if not depth or chance.random() < 0.2:
        return chance.choice(("a", "b", ".", "[a-z]", "\\w", "\\d", "[^x]", "\\p{L}", "é", "\\x00"))
    inner = [_regex(chance, depth - 1) for _ in range(chance.randrange(1, 4))]
    counts = ("", "*", "+", "?", "{3}", "{0,40}", "{200}", "{1,1000}", "{2,}")
    return f"({chance.choice(('', '|')).join(inner)}){chance.choice(counts)}"


HOSTILE = (0, 1, -1, 7, 1 << 31, 1 << 62, 10**40, 0.1, 1e-300, 1e300, None, True, "", "a{1000}", [], {}, ["a"] * 300)


def _schema(chance: random.Random, depth: int) -> Any:
    keys = {
        "type": lambda: chance.choice(
            ("object", "array", "string", "number", "integer", "null", ["string", "null"], 7)
        ),
        "properties": lambda: {chance.choice("abc"): _schema(chance, depth - 1) for _ in range(3)},
        "required": lambda: chance.choice((["a"], ["a", "b", "z"], "a", [1])),
        "items": lambda: _schema(chance, depth - 1),
        "anyOf": lambda: [_schema(chance, depth - 1) for _ in range(chance.randrange(4))],
        "oneOf": lambda: [_schema(chance, depth - 1) for _ in range(chance.randrange(4))],
        "allOf": lambda: [_schema(chance, depth - 1) for _ in range(chance.randrange(4))],
        "$ref": lambda: chance.choice(("#", "#/properties/a", "#/items", "#/nowhere", "x")),
        "pattern": lambda: _regex(chance, 3),
        "additionalProperties": lambda: _schema(chance, depth - 1),
        **{
            key: lambda: chance.choice(HOSTILE)
            for key in (
                *(
                    "minItems",
                    "maxItems",
                    "minLength",
                    "maxLength",
                    "minimum",
                    "maximum",
                    "multipleOf",
                    "const",
                    "enum",
                ),
                *("format", "exclusiveMinimum", "minProperties", "maxProperties", "prefixItems", "patternProperties"),
            )
        },
    }
    if depth <= 0:
        return chance.choice(({"type": "integer"}, True, {}, {"type": "string"}))
    return {key: keys[key]() for key in chance.sample(sorted(keys), chance.randrange(1, 5))}


def campaign(runs: int, seed: int, only: str) -> dict[str, Any]:
    """Run; return the report."""
    directory = pocket.model_dir()
    encoder, described = PromptEncoder.from_dir(directory), DescribedModel.read(directory)
    made = ReplyConstraints(encoder, find_reply_format(encoder), ends=described.eos_ids)
    endings = []
    try:
        for case, (kind, value) in CASES.items():
            if only in case:
                endings.append(_noted(attempt(made, case, Constraint(kind, value), random.Random(0))))
        for number in range(seed, seed + runs):
            chance = random.Random(number)
            endings.append(_noted(attempt(made, f"seed {number}", random_constraint(chance), chance)))
            made.check()
    finally:
        made.close()
    failed = [asdict(ending) for ending in endings if ending.how in ("defect", "slow")]
    return {
        "constraints": len(endings),
        **Counter(ending.how for ending in endings),
        "most seconds": max(ending.seconds for ending in endings),
        "slowest token": max(ending.step_s for ending in endings),
        "failed": failed,
    }


def _noted(ending: Ending) -> Ending:
    line = f"{ending.seconds:7.3f} {ending.step_s:7.3f} s  {ending.case}: {ending.how} {ending.says[:200]}"
    print(line, file=sys.stderr, flush=True)
    return ending


if __name__ == "__main__":
    sys.exit(run(campaign, __doc__ or "", of="constraint"))
