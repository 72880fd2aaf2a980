"""Reports of a request: how it relates to stored text, what was reused, how far it is, and why not more.

Reads requests; changes only the progress they show.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from rekindle.cache.blocks.hashing import BlockHash, tail_hash
from rekindle.engine.request import Request
from rekindle.engine.sequence import Ended, Sequence
from rekindle.engine.types import Chain, Link, Outcome, Progress, Report, Source, Timings
from rekindle.matching.explain import Explanation, explain_known

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0


def outcome_of(request: Request, min_reuse_tokens: int) -> Outcome:
    """Return EXACT, EXTEND, DIVERGE or MISS: how the texts relate, or MISS when their KV was gone.

    Refers to the agent's own branches when it has any, even if more was reused from another's. Reuse that no stored
    text explains (blocks that others computed meanwhile, or that an unfinished request left) counts as DIVERGE; for an
    agent with other memories only if it covers half of the prompt.
    """
    reused, num_prompt, match = request.sequence.reused_tokens, request.sequence.num_prompt, request.match
    if reused < min(min_reuse_tokens, num_prompt - 1) or reused == 0:
        return "miss"
    if match.relation != "none":
        return match.relation
    is_most = match.source is None and 2 * reused >= num_prompt
    return "diverge" if is_most or request.resumes or not match.has_own else "miss"


def source_of(request: Request) -> Source | None:
    """Return whose memory was reused; None if nothing was."""
    if not request.sequence.reused_tokens:
        return None
    return request.match.source or ("own" if request.resumes else "shared")


def progress_of(request: Request, *, now: float, min_reuse_tokens: int) -> Progress:
    """Return how far the prompt of a started request is computed."""
    sequence, admitted = request.sequence, request.times.admitted
    reused = sequence.reused_tokens
    return Progress(
        outcome=outcome_of(request, min_reuse_tokens),
        source=source_of(request),
        prompt_tokens=sequence.num_prompt,
        reused_tokens=reused,
        computed_tokens=max(0, min(sequence.num_computed, sequence.num_prompt) - reused),
        marked_tokens=max(request.breakpoint_tokens, default=0),
        elapsed_s=now - (admitted if admitted is not None else now),
        breakpoint_tokens=request.breakpoint_tokens,
    )


def report_progress(request: Request, *, now: float, min_reuse_tokens: int) -> None:
    """Give out the progress of a started request that has no token yet; also log it every `LOG_EVERY_S` seconds."""
    times = request.times
    if times.first_token is not None or times.admitted is None:
        return
    request.reply.generation.put(progress_of(request, now=now, min_reuse_tokens=min_reuse_tokens))
    logged = times.logged if times.logged is not None else times.admitted
    if now - logged >= LOG_EVERY_S:
        times.logged = now
        _log(request, now - times.admitted)


def _log(request: Request, elapsed_s: float) -> None:
    """Log one line: request, agent, tokens done, rate, and the time left at that rate."""
    sequence = request.sequence
    computed = max(0, sequence.num_computed - sequence.reused_tokens)
    left, rate = sequence.num_prompt - sequence.num_computed, computed / elapsed_s
    logger.info(
        "request %s of agent %s: %d of %d prompt tokens done, %.0f tokens/s, %s left",
        request.id,
        request.agent,
        sequence.num_computed,
        sequence.num_prompt,
        rate,
        f"about {left / rate:.0f} s" if rate > 0 else "an unknown time",
    )


def report_of(request: Request, *, now: float, min_reuse_tokens: int) -> Report:
    """Return what is known so far; final once the first token is out."""
    sequence, outcome = request.sequence, outcome_of(request, min_reuse_tokens)
    reused = sequence.reused_tokens
    return Report(
        outcome=outcome,
        source=source_of(request),
        matched_bytes=request.match.matched_bytes,
        prompt_tokens=sequence.num_prompt,
        reused_tokens=reused,
        hot_tokens=sequence.hot_tokens,
        warm_tokens=sequence.warm_tokens,
        computed_tokens=sequence.num_prompt - reused,
        completion_tokens=sequence.num_generated,
        reuse=sequence.reuse,
        timings=_timings(request, now),
        explanation=_explanation(request, outcome),
        marked_tokens=max(request.breakpoint_tokens, default=0),
        normalised=tuple(each.priced(reused) for each in request.taken_out),
        breakpoint_tokens=request.breakpoint_tokens,
        left_out=request.omitted.left_out,
        ignored=request.omitted.ignored,
        generic_tools=request.generic_tools,
        chain=request.chain,
    )


def chain_of(sequence: Sequence, ended: Ended) -> Chain:
    """Return which blocks an ended sequence read and ended in. All hashes are known by then, none is computed but that
    of a tail of a front."""
    num_read, last, head = sequence.reused_tokens, sequence.read, ended.head
    if last is None and num_read:  # of a front, which knows only how many
        last = _of_own_chain(sequence, ended, num_read)
    read = None if last is None else _link(sequence, ended, last, num_read)
    none = Link(sequence.root, sequence.root, 0)
    return Chain(sequence.root, read, _link(sequence, ended, head.hash, head.num_tokens) or none)


def _of_own_chain(sequence: Sequence, ended: Ended, num_tokens: int) -> BlockHash | None:
    """Return the hash of the block that has the last of these tokens: a full one, or the tail that ends with it; None
    if those before it are not known."""
    index, num_full = _index(sequence, num_tokens), len(ended.hashes)
    if index != num_full:
        return ended.hashes[index] if index < num_full else None
    before = ended.hashes[-1] if ended.hashes else sequence.root
    return tail_hash(before, sequence.ids[index * sequence.block_tokens : num_tokens])


def _link(sequence: Sequence, ended: Ended, last: BlockHash, num_tokens: int) -> Link | None:
    """Return the link to a block; None if the one before it is not known, as of a sequence that ends while it waits."""
    before = _index(sequence, num_tokens) - 1
    if before >= len(ended.hashes):
        return None
    return Link(last, ended.hashes[before] if before >= 0 else sequence.root, num_tokens)


def _index(sequence: Sequence, num_tokens: int) -> int:
    """Return which block has the last of these tokens; -1 for none."""
    return -(-num_tokens // sequence.block_tokens) - 1


def _timings(request: Request, now: float) -> Timings:
    times = request.times
    first = times.first_token if times.first_token is not None else now
    admitted = times.admitted if times.admitted is not None else first
    return Timings(
        queue_ms=max(0.0, admitted - times.submitted - times.match_s - times.load_s) * 1e3,
        match_ms=times.match_s * 1e3,
        load_ms=times.load_s * 1e3,
        prefill_ms=(first - admitted) * 1e3,
        first_token_ms=(first - times.submitted) * 1e3,
    )


def _explanation(request: Request, outcome: Outcome) -> Explanation | None:
    """Explain why not more was reused: a resume point before the end of the match, evicted KV although the text agreed,
    else where the texts differ."""
    sequence, match = request.sequence, request.match
    if not request.is_reuse_known:
        return explain_known("not_reported")
    if sequence.reuse == "off" or (request.resumes and match.source is None):
        return None
    differing = match.explanation if outcome in ("diverge", "miss") else None
    resumed = sequence.reused_tokens
    if sequence.num_unresumed:
        where = f"matched {resumed + sequence.num_unresumed:,} tokens, resumed at {resumed:,}"
        if differing is None:
            return explain_known("window_ended", where)
        return replace(differing, detail=f"{differing.detail}; {where}")
    missing = min(match.num_tokens, sequence.num_reusable) - resumed
    if missing >= sequence.block_tokens:
        return explain_known("evicted", f"{missing} of {match.num_tokens} matched tokens")
    return differing
