"""Attack the reading of GGUF files: each is refused with words or loads, within a time and a memory that are set.

    python -m tools.gguf_fuzz --runs 300
    python -m tools.gguf_fuzz --runs 0 --only words     # the written cases alone whose names hold this text

First the cases of `tools/gguf_cases.py`: a small model whose file claims, repeats, overlaps or nests what no honest one
does, sparse where it has gigabytes. Then random ones: values of a good file are replaced by hostile ones of any kind,
and bytes of its header are changed. Each file is read in a process of its own, once as `rekindle serve FILE` reads it
(description, tokenizer, a rendered template, weights, probe, self-test), and once as a server in front of llama-server
does, for its texts alone. Such a process may take `MOST_BYTES` more than it begins with, and `MOST_S` of a processor.

Prints a JSON report; exit code 1 if a file ended in anything but a refusal, or a model that was proved.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.errors import BadRequest, ModelRefused
from rekindle.model.checkpoint import Source
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.bench.engine.gguf_model import contents
from tests.tiny_models import tiny_model_dir
from tools.fuzz_command import run
from tools.gguf_cases import CASES, Draft, mutated

MOST_S = 20.0
MOST_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Ending:
    """How the reading of a file ended: `refused`, `loaded`, or what it should not; what it took."""

    case: str
    how: str
    says: str
    seconds: float
    mib: int


def serve(path: Path) -> None:
    """Read a file as `rekindle serve` does, up to a model that was proved."""
    source = Source.find(str(path), None)
    directory = source.fetch_description()
    _render(directory)
    load_model(
        ModelSettings(model=str(path), kv="bf16", kernels="torch", threads=1),
        block_tokens=16,
        max_context=None,
        format_map_dir=None,
    )


def front(path: Path) -> None:
    """Read a file as a server in front of llama-server does."""
    _render(Source.find(str(path), None).fetch_texts())


def _render(directory: Path) -> None:
    encoder = PromptEncoder.from_dir(directory)
    with contextlib.suppress(BadRequest):  # a template may refuse a conversation, within its allowance
        encoder.template.render([{"role": "user", "content": "Hello"}])
    encoder.tokenizer.encode(["Hello there, 12 of you"])


WAYS: dict[str, Callable[[Path], None]] = {"serve": serve, "front": front}


def attempt(case: str, path: Path) -> Ending:
    """Read a file in a process of its own, in both ways."""
    worst = Ending(case, "refused", "", 0.0, 0)
    for way in WAYS:
        ending = _in_process(case, path, way)
        if ending.how not in ("refused", "loaded"):
            return ending
        worst = Ending(
            case,
            ending.how if way == "serve" else worst.how,
            ending.says if way == "serve" else worst.says,
            max(worst.seconds, ending.seconds),
            max(worst.mib, ending.mib),
        )
    return worst


def _in_process(case: str, path: Path, way: str) -> Ending:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_limited, args=(path, way, theirs))
    began = time.monotonic()
    process.start()
    theirs.close()
    try:
        how, says, seconds, mib = ours.recv() if ours.poll(4 * MOST_S) else ("hangs", way, 4 * MOST_S, 0)
    except EOFError:
        process.join()
        how, says, seconds, mib = "killed", f"{way}: exit code {process.exitcode}", time.monotonic() - began, 0
    process.kill()
    process.join()
    return Ending(case, how, says, round(seconds, 2), mib)


def _limited(path: Path, way: str, pipe: Connection) -> None:
    """Read a file with limits; send how it ended."""
    os.environ["XDG_CACHE_HOME"] = str(path.parent / "cache")
    resource.setrlimit(resource.RLIMIT_CPU, (int(MOST_S), int(MOST_S)))
    _, before = _memory()
    size, _ = _memory()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))
    began = time.process_time()
    try:
        WAYS[way](path)
        how, says = "loaded", ""
    except ModelRefused as error:
        how, says = "refused", str(error)
    except BaseException as error:  # a panic of a library in Rust is no Exception
        import traceback

        how, says = "defect", f"{way}: {type(error).__name__}: {error}\n" + traceback.format_exc()[-1500:]
    _, after = _memory()
    pipe.send((how, says, time.process_time() - began, (after - before) >> 20))


def _memory() -> tuple[int, int]:
    """Bytes of address space, and of the most that was resident."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmSize"].split()[0]) << 10, int(status["VmHWM"].split()[0]) << 10


def campaign(runs: int, seed: int, only: str) -> dict[str, Any]:
    """Run; return the report."""
    endings: list[Ending] = []
    with tempfile.TemporaryDirectory(prefix="rekindle-gguf-") as name:
        root = Path(name)
        model = tiny_model_dir("llama", "bf16", root)
        metadata, tensors = contents(model, "tiny", "f32")
        metadata["tokenizer.chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        path = root / "m.gguf"
        for case in [case for case in CASES if only in case]:
            draft = Draft(metadata, tensors)
            CASES[case](draft)
            draft.write(path)
            endings.append(_noted(attempt(case, path)))
        for number in range(seed, seed + runs):
            draft = Draft(metadata, tensors)
            what = mutated(draft, random.Random(number))
            draft.write(path)
            endings.append(_noted(attempt(f"seed {number}: {what}", path)))
    failed = [asdict(ending) for ending in endings if ending.how not in ("refused", "loaded")]
    return {
        "cases": len(endings),
        **Counter(ending.how for ending in endings),
        "most seconds": max(ending.seconds for ending in endings),
        "most MiB": max(ending.mib for ending in endings),
        "failed": failed,
    }


def _noted(ending: Ending) -> Ending:
    print(
        f"{ending.seconds:6.2f} s {ending.mib:6} MiB  {ending.case[:90]}: {ending.how} {ending.says[:300]}",
        file=sys.stderr,
        flush=True,
    )
    return ending


if __name__ == "__main__":
    sys.exit(run(campaign, __doc__ or "", of="file"))
