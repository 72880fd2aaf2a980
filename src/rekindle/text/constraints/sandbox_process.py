"""The process of the sandbox: `python -m rekindle.text.constraints.sandbox_process`, which `sandbox` starts.

Reads a vocabulary and then jobs, a line of JSON each, and answers each job with a line. Every job runs in a child of
its own, and the system bounds its processor time and memory: what takes too much of either is killed, and nothing of it
stays. The process ends with its input.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llguidance import gbnf_to_lark

from rekindle.text.constraints.compiling import Compiler, Words, unenforced
from rekindle.text.constraints.schema import fault, schema_grammar

MOST_BYTES = 2 << 30  # of addresses; the process itself has less than half a gigabyte
NICENESS = 10  # replies come first
_FIRST = json.dumps({"grammars": [{"lark_grammar": "start: /[a-z]*/"}]})


def main() -> None:
    """Serve jobs until the input ends."""
    os.nice(NICENESS)
    given = json.loads(sys.stdin.readline() or "null")
    if given is None:
        return
    tokens, special = [each.encode("latin-1") for each in given["tokens"]], given["special"]
    compiler = Compiler(Words(tokens, special, given["ends"], _longest_first(tokens, special)))
    compiler.fault(_FIRST)  # what is loaded at first use is not of a grammar
    for line in sys.stdin:
        sys.stdout.write(f"{_tried(compiler, json.loads(line)) or json.dumps(None)}\n")
        sys.stdout.flush()


def _longest_first(tokens: Sequence[bytes], special: Sequence[int]) -> Callable[[bytes], list[int]]:
    """Return what tokenizes by the longest token that fits: not always as the model's tokenizer does, but always in
    tokens that the grammar allows."""
    without = frozenset(special)
    ids = {token: at for at, token in enumerate(tokens) if token and at not in without}
    longest = max(map(len, ids), default=1)

    def encode(text: bytes) -> list[int]:
        found, at = [], 0
        while at < len(text):
            sizes = range(min(longest, len(text) - at), 0, -1)
            size = next((size for size in sizes if text[at : at + size] in ids), None)
            if size is None:
                break
            found.append(ids[text[at : at + size]])
            at += size
        return found

    return encode


def _tried(compiler: Compiler, job: Mapping[str, Any]) -> str:
    """Do a job in a child; return its answer, nothing if it was killed."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(ours)
            _bound(job["seconds"])
            with os.fdopen(theirs, "w") as answer:
                json.dump(_answer(compiler, job), answer)
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def _bound(seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(compiler: Compiler, job: Mapping[str, Any]) -> dict[str, Any]:
    if "gbnf" in job:
        error, lark = _translated(job["gbnf"])
        return {"error": error, "path": "", "num_bytes": 0, "seconds": time.process_time(), "lark": lark}
    if "schema" in job:
        path, error = fault(job["schema"], lambda schema: compiler.fault(schema_grammar(schema)))
        return {"error": error, "path": path, "num_bytes": 0, "seconds": time.process_time()}
    before = _own_bytes()
    matcher = compiler.compiled(job["grammar"])
    error = unenforced(job["grammar"]) or compiler.walk(matcher)
    return {"error": error, "path": "", "num_bytes": _own_bytes() - before, "seconds": time.process_time()}


def _translated(gbnf: str) -> tuple[str, str]:
    """Return what is wrong with a grammar in GBNF, or that grammar in Lark's notation."""
    try:
        return "", gbnf_to_lark.gbnf_to_lark(gbnf)
    except gbnf_to_lark.GbnfToLarkError as error:
        return str(error), ""
    except Exception as error:
        # Border: a translator of somebody else's, which raises whatever Python does, as IndexError at an open text.
        return f"it cannot be read as GBNF: {error}", ""


def _own_bytes() -> int:
    """Return the resident memory that is no file's; where the system does not say, the most that was resident.

    What is free goes back to the system first: neither what was used for a while counts, nor is taken again unseen.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # of glibc
        trim(0)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main()
