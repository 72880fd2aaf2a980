"""vLLM with our connector in a process of its own, in an environment of its own: run by `served`, killed at its end.

The process, `python -m benchmarks.vllm.engine`, reads a job as JSON from its input and writes a line of JSON for each
prompt. Here and there only what both environments have is imported.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CODE = (ROOT / "src", *sorted(ROOT.glob("packages/*/src")), ROOT / "pocket" / "src", ROOT)
MODEL = ROOT / "pocket" / "src" / "rekindle_pocket" / "model"
ALONE = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
MARK = "ANSWER "


@dataclass(frozen=True)
class Prompt:
    """Token ids, how many tokens to reply, and what the request says of itself. `together`: with those before it."""

    ids: list[int]
    tokens: int = 4
    params: dict[str, Any] = field(default_factory=dict)
    together: bool = False


@dataclass(frozen=True)
class Answer:
    """A reply: its ids, log probabilities of its first token's candidates, and what vLLM and we say was reused.

    `load_s` and `save_s` are seconds of the connector within `seconds`, of all requests that were served together.
    """

    ids: list[int]
    first: dict[int, float]
    cached_tokens: int
    reuse: dict[str, int]
    seconds: float
    load_s: float
    save_s: float


def served(
    directory: Path | None,
    prompts: list[Prompt],
    *,
    record_format: str = "native",
    python: str = sys.executable,
    **engine: Any,
) -> list[Answer]:
    """Serve prompts one after another in a new process, let its store write everything, and kill it with -9.

    Without a directory there is no connector. `engine` are arguments of vLLM's own; AssertionError with what the
    process wrote if it ended otherwise.
    """
    place = None if directory is None else str(directory)
    job = {"dir": place, "format": record_format, "engine": engine, "prompts": [asdict(prompt) for prompt in prompts]}
    done = run_job(python, "benchmarks.vllm.engine", job)
    assert done.status == -signal.SIGKILL, done.log
    lines = done.lines
    return [Answer(**{**line, "first": {int(key): value for key, value in line["first"].items()}}) for line in lines]


@dataclass(frozen=True)
class JobDone:
    """How a process ended: its status, the lines that it marked, the end of what it wrote."""

    status: int
    lines: list[dict[str, Any]]
    log: str


def run_job(python: str, module: str, job: dict[str, Any]) -> JobDone:
    """Run a module as a program of another environment, with a job as JSON; it finds this code, then PYTHONPATH's."""
    given = [path for path in [os.environ.get("PYTHONPATH")] if path]
    done = subprocess.run(
        [python, "-m", module],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | ALONE | {"PYTHONPATH": os.pathsep.join([*map(str, CODE), *given])},
        check=False,
    )
    lines = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)]
    return JobDone(done.returncode, lines, done.stdout[-2000:] + done.stderr[-6000:])


def main() -> None:
    """Serve the job on the standard input, then kill this process."""
    job = json.load(sys.stdin)
    llm = engine_of(job["dir"], job["format"], job["engine"])
    batch: list[Prompt] = []
    for prompt in (Prompt(**given) for given in job["prompts"]):
        if not prompt.together:
            answer(llm, batch)
            batch = []
        batch.append(prompt)
    answer(llm, batch)
    flush()
    os.kill(os.getpid(), signal.SIGKILL)


def engine_of(directory: str | None, record_format: str, given: dict[str, Any]) -> Any:
    """vLLM, with our connector if there is a directory; `given` are arguments of its own."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = {
        "kv_connector": "RekindleConnector",
        "kv_connector_module_path": "rekindle_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"dir": directory, "format": record_format} | given.pop("store", {}),
    } | given.pop("transfer", {})
    defaults = {
        "model": str(MODEL),
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "block_size": 64,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
    }
    connector = {} if directory is None else {"kv_transfer_config": KVTransferConfig(**transfer)}
    return LLM(**(defaults | given), **connector)


def answer(llm: Any, prompts: list[Prompt]) -> None:
    """Serve prompts together and print their answers."""
    from vllm import SamplingParams

    if not prompts:
        return
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=prompt.tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=5,
            extra_args={"kv_transfer_params": prompt.params},
        )
        for prompt in prompts
    ]
    before = spent()
    begun = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt.ids} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    load_s, save_s = (now - earlier for now, earlier in zip(spent(), before, strict=True))
    for output in outputs:
        reply = output.outputs[0]
        first = {key: value.logprob for key, value in reply.logprobs[0].items()}
        reuse = (output.kv_transfer_params or {}).get("rekindle", {})
        found = Answer(list(reply.token_ids), first, output.num_cached_tokens, reuse, seconds, load_s, save_s)
        print(MARK + json.dumps(asdict(found)), flush=True)


def spent() -> tuple[float, float]:
    """Seconds that the connector of a worker in this process has loaded and saved for; none if it is in another."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return 0.0, 0.0
    transfers = get_kv_transfer_group().transfers
    return transfers.load_s, transfers.save_s


def flush() -> None:
    """Let the store of this process write all that is queued."""
    from rekindle_vllm.owner import OPEN

    for owner in list(OPEN.values()):
        assert owner.store.flush(120)


if __name__ == "__main__":
    main()
