"""Recall of the bundled model by distance: native KV, 4-bit KV in memory, 4-bit KV loaded from disk.

    rekindle bench recall --cases 40

Every arm answers the same questions about facts stated a given number of words earlier. The conversation up to its
last turn is computed first and the question is asked on top of what was stored, in the third arm by a new engine on
the same directory. Answers count if they equal the expected sentence.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.errors import PromptTooLong
from rekindle_lab.record import Measurement, Origin, append_lines
from rekindle_pocket.conversations import Chat, recall_case

DISTANCES = (50, 200, 600, 1200, 2000)
MAX_ANSWER_TOKENS = 28
KV = Literal["auto", "bf16", "fp32", "q4h"]


@dataclass(frozen=True, slots=True)
class RecallArm:
    """Answers with KV in this format; `restarted`: by a new engine, from disk."""

    name: str
    kv: KV
    restarted: bool = False


ARMS = (RecallArm("native", "bf16"), RecallArm("4 bits, hot", "q4h"), RecallArm("4 bits, after a restart", "q4h", True))


@dataclass(frozen=True, slots=True)
class RecallBench:
    """Questions per distance (in words), the seed they are drawn from, and the file for JSON lines."""

    cases: int = 20
    seed: int = 10_000
    out: Path | None = None


@dataclass(frozen=True, slots=True)
class Question:
    distance: int
    agent: str
    chat: Chat


@dataclass(slots=True)
class RecallScore:
    """Answers at one distance in one arm: `right` equal the expected sentence, `recalled` contain its fact."""

    right: int = 0
    recalled: int = 0
    asked: int = 0
    reused_tokens: int = 0
    prompt_tokens: int = 0


def questions_of(bench: RecallBench) -> list[Question]:
    found = []
    for distance in DISTANCES:
        chooser = random.Random(bench.seed + distance)
        found += [Question(distance, f"{distance}-{i}", recall_case(chooser, distance)) for i in range(bench.cases)]
    return found


@contextmanager
def _engine(settings: Settings, kv: KV, directory: Path) -> Iterator[Engine]:
    model = replace(settings.model, kv=kv)
    store = replace(settings.store, dir=directory, enabled=True)
    with Engine(replace(settings, model=model, store=store)) as engine:
        yield engine


def _prime(engine: Engine, question: Question) -> bool:
    """Compute the conversation up to its last turn; False if it does not fit the context."""
    try:
        engine.chat(question.agent, question.chat["messages"][:-2], temperature=0.0, max_tokens=1)
    except PromptTooLong:
        return False
    return True


def _ask(engine: Engine, question: Question, score: RecallScore) -> None:
    try:
        reply = engine.chat(question.agent, question.chat["messages"], temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    except PromptTooLong:
        return
    score.asked += 1
    score.right += reply.text.strip() == question.chat["answer"]
    score.recalled += contains_fact(reply.text, question.chat)
    score.reused_tokens += reply.report.reused_tokens
    score.prompt_tokens += reply.report.prompt_tokens


def contains_fact(reply: str, chat: Chat) -> bool:
    """Whether a reply contains the words of the expected answer that are not in its question, in any order."""
    asked, expected, replied = (_words(text) for text in (chat["messages"][-1]["content"], chat["answer"], reply))
    return expected - asked <= replied


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def ask_arm(
    settings: Settings, arm: RecallArm, questions: Sequence[Question], tick: Progress
) -> dict[int, RecallScore]:
    """Ask all questions in one arm and return scores by distance; skips what does not fit the context."""
    scores = {question.distance: RecallScore() for question in questions}
    task = tick.add_task(arm.name, total=2 * len(questions))
    with tempfile.TemporaryDirectory(prefix="rekindle-recall-") as directory:
        place = Path(directory)
        with _engine(settings, arm.kv, place) as engine:
            primed = []
            for question in questions:
                primed += [question] if _prime(engine, question) else []
                tick.advance(task)
            if not arm.restarted:
                for question in primed:
                    _ask(engine, question, scores[question.distance])
                    tick.advance(task)
                return scores
        with _engine(settings, arm.kv, place) as engine:
            for question in primed:
                _ask(engine, question, scores[question.distance])
                tick.advance(task)
    return scores


def run_recall(settings: Settings, bench: RecallBench, console: Console) -> int:
    """Run every arm, print the table, append lines if wanted; return 0."""
    questions = questions_of(bench)
    with Progress(console=console, transient=True) as tick:
        results = {arm.name: ask_arm(settings, arm, questions, tick) for arm in ARMS}
    table = Table("words between", *results, "reused", title=f"recall, {bench.cases} questions a row")
    measurements = []
    for distance in DISTANCES:
        cells = []
        for arm in results:
            score = results[arm][distance]
            cells.append(f"{score.right}/{score.asked}" if score.asked else "too long")
            if score.asked:
                share = score.right / score.asked
                measurements.append(Measurement(f"recall at {distance} words", arm, "share", (share,)))
        reused = sum(results[arm][distance].reused_tokens for arm in results)
        prompts = sum(results[arm][distance].prompt_tokens for arm in results)
        table.add_row(f"{distance:,}", *cells, f"{reused / prompts:.0%}" if prompts else "")
    console.print(table)
    if bench.out is not None:
        append_lines(bench.out, Origin.here("recall", {"cases": bench.cases, "seed": bench.seed}), measurements)
    return 0
