"""Speculation: how many drafted tokens to compute with the next step, so that it gives most tokens per second.

Owns the measured seconds of decoding steps and the counts of drafted and accepted tokens; the rest is derived from the
sequences. Drafted rows follow a sequence's last token; the core samples them in order, as single steps would, and takes
the next row only where the draft was right, so replies do not depend on drafts.

With N sequences a step gives N tokens, and with k more rows N plus the chances that those rows are right. That number
by the step's seconds is made as large as possible: a row that is likely right is computed if it lengthens the step
little. What is not computed is compared with what was sampled, too: a sequence that did not pay is known again to pay
before a row is spent on it.

A step that prefills has no drafts, so they take no row from a prompt, and no step is made longer than `max_stall_s`.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import replace
from operator import itemgetter
from typing import Literal

import numpy as np

from rekindle.engine.core.costs import StepCosts
from rekindle.engine.core.scheduler import Chunk
from rekindle.engine.drafts import NO_DRAFT, Draft, find_draft
from rekindle.engine.sequence import Sequence

MAX_DRAFT = 15


def max_draft(setting: Literal["auto", "off"], *, is_steady: bool, has_states: bool = False) -> int:
    """Return the most tokens of a draft: none where bits depend on the rows of a step, or replies would, too.

    Nor with recurrent states, which cannot go back to the token before a wrong one.
    """
    return MAX_DRAFT if setting == "auto" and is_steady and not has_states else 0


class Speculation:
    """Drafts of one core; none at all if `max_tokens` is 0. `costs` learn from steps that only decode."""

    def __init__(self, costs: StepCosts, *, max_tokens: int, max_step_s: float) -> None:
        self.num_drafted = 0  # tokens that were computed as drafts
        self.num_accepted = 0  # of these, those that became part of a reply
        self._costs = costs
        self._max_tokens = max_tokens
        self._max_step_s = max_step_s
        self._drafts: dict[Sequence, Draft] = {}  # of the step under way

    @property
    def drafts(self) -> bool:
        """Whether it ever proposes any."""
        return self._max_tokens > 0

    def propose(self, chunks: Values[Chunk]) -> list[Chunk]:
        """Return the chunks of a step with the drafts that pay; the chunks themselves where something prefills."""
        self._drafts = {}
        if self._max_tokens:
            self._drafts = {chunk.sequence: self._find(chunk.sequence) for chunk in chunks if _decodes(chunk)}
        if len(self._drafts) < len(chunks) or not any(draft.ids for draft in self._drafts.values()):
            return list(chunks)
        counts = self._counts_that_pay(chunks)
        drafts = [self._drafts[chunk.sequence].ids[:count] for chunk, count in zip(chunks, counts, strict=True)]
        return [replace(chunk, draft=ids) if ids else chunk for chunk, ids in zip(chunks, drafts, strict=True)]

    def _find(self, sequence: Sequence) -> Draft:
        """Return a draft that leaves room for the token after it."""
        most = min(self._max_tokens, sequence.max_new_tokens - sequence.num_generated - 1)
        return find_draft(sequence.ids, sequence.texts, most=most) if most > 0 else NO_DRAFT

    def _counts_that_pay(self, chunks: Values[Chunk]) -> list[int]:
        """Return how many tokens of each chunk's draft to compute: the likeliest ones of all drafts, up to the number
        that gives most tokens per second."""
        rows = [
            (chance, index)
            for index, chunk in enumerate(chunks)
            for chance in chunk.sequence.acceptance.chances(self._drafts[chunk.sequence])
        ]
        rows.sort(key=itemgetter(0), reverse=True)  # stable, and chances never increase: a draft's rows stay in order
        gained = np.cumsum([len(chunks), *[chance for chance, _ in rows]])
        seconds = self._costs.predict_each(rows=len(chunks) + np.arange(len(rows) + 1), row_contexts=_contexts(chunks))
        rates = gained / np.maximum(seconds, 1e-9)
        rates[1:][seconds[1:] > self._max_step_s] = 0.0
        taken = [index for _, index in rows[: int(rates.argmax())]]
        return [taken.count(index) for index in range(len(chunks))]

    def observe(self, chunks: Values[Chunk], seconds: float) -> None:
        """Learn from a finished step."""
        if all(map(_decodes, chunks)):
            rows = sum(1 + len(chunk.draft) for chunk in chunks)
            self._costs.observe(rows=rows, row_contexts=_contexts(chunks), seconds=seconds)

    def judge(self, chunk: Chunk) -> None:
        """Learn from the tokens that were sampled in a step, and count them."""
        sequence = chunk.sequence
        draft = self._drafts.get(sequence, NO_DRAFT)
        sampled = sequence.token_ids[chunk.start + chunk.num_rows : sequence.num_tokens].tolist()
        num_right = sequence.acceptance.judge(draft, sampled)
        self.num_drafted += len(chunk.draft)
        self.num_accepted += min(num_right, len(chunk.draft))


def _contexts(chunks: Values[Chunk]) -> int:
    """The tokens that the rows of a decoding step attend to; those of a draft share the context of their sequence."""
    return sum([chunk.start for chunk in chunks])


def _decodes(chunk: Chunk) -> bool:
    return chunk.samples and chunk.num_rows == 1
