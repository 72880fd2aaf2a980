"""`python -m benchmarks multiple-choice [MODEL]`: lm-eval's multiple choice against a server, and through transformers.

    pip install "lm-eval[api]"        # in an environment of its own, or in this one
    python -m benchmarks multiple-choice --lm-eval path/to/lm_eval

Made-up questions in the shape of arc_easy lie in local files; lm-eval runs unchanged, with few-shot examples that are
the same for all questions, or drawn for each (its default). Arms: `transformers` (lm-eval's `hf`), and its
`local-completions` with a server that keeps scores (`rekindle`) and with one that does not (`reuse off`). Compared are
the log likelihoods of all choices; measured, the seconds in the engine's steps and the tokens computed.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.coding_day.server import serving
from rekindle.config import Settings
from rekindle.errors import ConfigError, RekindleError
from rekindle_lab.bench.workload import WORDS
from rekindle_lab.record import Measurement, Origin, deliver

PLAIN, OURS, OFF = "transformers", "rekindle", "reuse off"
Shots = Literal["same", "drawn"]
SHOTS: tuple[Shots, ...] = ("same", "drawn")
PLACES = ("kitchen", "garden", "cellar", "attic", "office", "stable", "garage", "library")
THINGS = ("copper key", "old map", "red lamp", "silver spoon", "blue box", "tin whistle", "wooden chest", "glass jar")
NAMES = ("Ada", "Bo", "Cleo", "Dag", "Eve", "Finn", "Gro", "Hugo")
TRAIN = 64
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    train: {train}
    test: {test}
output_type: multiple_choice
training_split: train
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{choices.label.index(answerKey)}}}}"
doc_to_choice: "{{{{choices.text}}}}"
num_fewshot: {shots}
{sampler}metric_list:
  - metric: acc
  - metric: acc_norm
"""


@dataclass(frozen=True, slots=True)
class ChoiceBench:
    """How many questions, with how many few-shot examples; `program` is lm-eval's command."""

    program: str = "lm_eval"
    questions: int = 100
    shots: int = 5
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.questions < 1 or not 0 <= self.shots <= TRAIN:
            raise ConfigError(f"give at least one question, and 0 to {TRAIN} examples")
        if shutil.which(self.program) is None:
            raise ConfigError(f'there is no {self.program!r}: install "lm-eval[api]", or name its command')


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What lm-eval printed: a log likelihood for each choice of each question, and shares of right answers."""

    likelihoods: tuple[float, ...]
    acc: float
    acc_norm: float
    seconds: float  # of lm-eval itself, with its start


def questions(count: int, seed: int) -> list[dict[str, Any]]:
    """Return questions in the form of arc_easy: four choices, a key; each says where its answer is."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        places, things, names = rng.sample(PLACES, 4), rng.sample(THINGS, 4), rng.sample(NAMES, 4)
        triples = zip(names, things, places, strict=True)
        story = " ".join(f"{who} put the {thing} in the {place}." for who, thing, place in triples)
        filler, right = " ".join(rng.choices(WORDS, k=12)), rng.randrange(4)
        rows.append(
            {
                "id": f"made-up-{number}",
                "question": f"{story} {filler.capitalize()}. Where is the {things[right]}?",
                "choices": {"text": [f"in the {place}" for place in places], "label": ["A", "B", "C", "D"]},
                "answerKey": "ABCD"[right],
            }
        )
    return rows


def write_task(folder: Path, options: ChoiceBench, shots: Shots) -> str:
    """Write a task of lm-eval with its data; return its name."""
    name = f"made_up_{shots}"
    for split, count, seed in (("train", TRAIN, options.seed + 1), ("test", options.questions, options.seed)):
        rows = questions(count, seed)
        (folder / f"{name}-{split}.json").write_text("\n".join(map(json.dumps, rows)) + "\n")
    sampler = "fewshot_config:\n  sampler: first_n\n" if shots == "same" else ""
    given = {split: folder / f"{name}-{split}.json" for split in ("train", "test")}
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, shots=options.shots, sampler=sampler, **given))
    return name


def evaluate(options: ChoiceBench, folder: Path, task: str, model: Sequence[str]) -> Evaluation:
    """Run lm-eval on a task and read what it wrote."""
    written = Path(tempfile.mkdtemp(dir=folder))
    command = [options.program, "run", "--tasks", task, "--include_path", folder, *model]
    command += ["--batch_size", "8", "--output_path", written, "--log_samples", "--seed", str(options.seed)]
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RekindleError(f"lm-eval failed with {done.returncode}: {done.stderr[-2000:]}")
    (results,) = written.rglob("results_*.json")
    (samples,) = written.rglob("samples_*.jsonl")
    return _read(json.loads(results.read_text()), task, list(_lines(samples)))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        yield json.loads(line)


def _read(results: Mapping[str, Any], task: str, samples: Sequence[Mapping[str, Any]]) -> Evaluation:
    ordered = sorted(samples, key=lambda sample: int(sample["doc_id"]))
    scores = results["results"][task]
    return Evaluation(
        tuple(float(choice[0]) for sample in ordered for choice in sample["filtered_resps"]),
        scores["acc,none"],
        scores["acc_norm,none"],
        float(results["total_evaluation_time_seconds"]),
    )


class Arms:
    """The arms on one task: `plain` first, which the others are compared with."""

    def __init__(self, settings: Settings, options: ChoiceBench, folder: Path, shots: Shots) -> None:
        from rekindle_pocket import MODEL_DIR

        self.measured: list[Measurement] = []
        self.rows: list[tuple[str, ...]] = []
        self._settings, self._options, self._folder, self._shots = settings, options, folder, shots
        self._task = write_task(folder, options, shots)
        self._directory = Path(settings.model.model or MODEL_DIR)
        dtype = {"auto": "auto", "bf16": "bfloat16", "fp32": "float32"}[settings.model.dtype]
        given = f"pretrained={self._directory},dtype={dtype}"
        self._plain = self._evaluate(["--model", "hf", "--device", "cpu", "--model_args", given])
        self._add(PLAIN, self._plain, ("", "", ""))

    def _evaluate(self, model: Sequence[str]) -> Evaluation:
        return evaluate(self._options, self._folder, self._task, model)

    def _add(self, arm: str, found: Evaluation, figures: tuple[str, str, str]) -> None:
        self.rows.append(
            (self._shots, arm, f"{found.acc:.3f}", f"{found.acc_norm:.3f}", *figures, f"{found.seconds:.1f}")
        )

    def serve(self, arm: str) -> bool:
        """Run lm-eval against a server; return whether its shares of right answers are those of `transformers`."""
        store = replace(self._settings.store, dir=self._folder / f"{self._shots} {arm}")
        cache = replace(self._settings.cache, reuse="off" if arm == OFF else "on")
        with serving(replace(self._settings, store=store, cache=cache), datetime.now) as (engine, port):
            url = f"http://127.0.0.1:{port}/v1/completions"
            given = f"model=default,base_url={url},tokenizer={self._directory},max_length={engine.max_context}"
            found = self._evaluate(["--model", "local-completions", "--model_args", given])
            counts = engine.components.core.counts
            step_s, num_rows = counts.step_s, counts.num_rows
        pairs = zip(self._plain.likelihoods, found.likelihoods, strict=True)
        largest = max(abs(plain - ours) for plain, ours in pairs)
        self._add(arm, found, (f"{largest:.4f}", f"{step_s:.2f}", f"{num_rows:,}"))
        detail = {"acc": found.acc, "acc_norm": found.acc_norm, "largest_difference": largest}
        self.measured += [
            Measurement(f"steps, {self._shots} examples", arm, "s", (step_s,), detail),
            Measurement(f"tokens, {self._shots} examples", arm, "tokens", (float(num_rows),), detail),
        ]
        return (found.acc, found.acc_norm) == (self._plain.acc, self._plain.acc_norm)


def run_choice_bench(settings: Settings, options: ChoiceBench, console: Console) -> int:
    """Run the bench; exit code 1 if a share of right answers is not that of transformers."""
    measured: list[Measurement] = []
    table = Table("examples", "arm", "acc", "acc_norm", "largest difference", "engine, s", "tokens", "lm-eval, s")
    equal = True
    for shots in SHOTS:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            arms = Arms(settings, options, Path(name), shots)
            for arm in (OURS, OFF):
                equal = arms.serve(arm) and equal
            measured += arms.measured
            for row in arms.rows:
                table.add_row(*row)
    shown = {
        **asdict(options),
        "out": None,
        "program": Path(options.program).name,
        "dtype": settings.model.dtype,
        "kv": settings.model.kv,
    }
    deliver(measured, Origin.here("multiple-choice", shown), options.out, console)
    console.print(table)
    return 0 if equal else 1
