"""Administration of a running engine's agents: inspect, pin, offload, fork, rewind, delete, purge.

Each operation calls the intake, then the engine, and waits for the store if it must be durable: what the store refuses
is undone, so that nothing has changed. Called from any thread except the engine's own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import TypeVar

from rekindle.engine.components import Components
from rekindle.engine.core.interface import Core
from rekindle.engine.core.purge import HotPurge, evict_hashes, idle_hashes, wipe, withdraw
from rekindle.engine.gauges import hot_tokens
from rekindle.engine.memory.agent_commands import Before
from rekindle.engine.memory.branches import Branch, KnownBranch, shared_tokens
from rekindle.engine.memory.sequences import to_save
from rekindle.engine.types import AgentInfo, BranchInfo, PurgeReport
from rekindle.errors import BadRequest, NotFound, PurgeUnproved, RekindleError, StoreError
from rekindle.store.commands import Move
from rekindle.store.warm import PurgeProof

logger = logging.getLogger(__name__)
T = TypeVar("T")

FLUSH_S = 60.0
PROOF_S = 600.0  # a purge reads back every slot that it freed


def infos(parts: Components, ask: Callable[[], Sequence[Sequence[Branch]]]) -> list[AgentInfo]:
    """Return the agents whose branches `ask` returns on the intake thread, most recently used first; one call per
    thread, however many agents there are."""
    now, book = time.time(), parts.memory.book

    def look() -> list[tuple[Sequence[Branch], float | None]]:
        found = [branches for branches in ask() if branches]
        return [(each, book.pinned_until(each[0].namespace, each[0].agent, now)) for each in found]

    agents = parts.intake.call(look).result()
    is_here = parts.backend is None  # a front keeps texts: where their KV is, is known to what computes
    longest = [max(branches, key=lambda branch: branch.num_tokens) for branches, _ in agents]
    hot = parts.loop.call(lambda core: hot_tokens(core.cache, longest)).result()
    is_durable = parts.is_in_place()
    found = [
        AgentInfo(
            namespace=branch.namespace,
            agent=branch.agent,
            branches=len(branches),
            num_tokens=branch.num_tokens,
            saved_tokens=branch.saved_tokens if is_durable else 0,
            hot_tokens=num_hot if is_here else 0,
            warm_tokens=max(0, branch.saved_tokens - num_hot) if is_durable and is_here else 0,
            last_use=max(each.last_use for each in branches),
            pinned_until=pinned,
        )
        for (branches, pinned), branch, num_hot in zip(agents, longest, hot, strict=True)
    ]
    return sorted(found, key=lambda info: -info.last_use)


def info(parts: Components, namespace: str, agent: str) -> AgentInfo:
    """Return one agent with its branches, the latest first; raises NotFound."""

    def look() -> list[Sequence[Branch]]:
        return [parts.memory.know_agent(namespace, agent) or parts.memory.book.of(namespace, agent)]

    found = infos(parts, look)
    if not found:
        raise NotFound(f"no agent {agent!r}", param="agent")
    return replace(found[0], branch_infos=_branch_infos(parts, namespace, agent))


def _branch_infos(parts: Components, namespace: str, agent: str) -> tuple[BranchInfo, ...]:
    book, size = parts.memory.book, parts.spec.layout.block_tokens

    def look() -> list[tuple[Branch, tuple[int, tuple[str, ...]]]]:
        everybody = book.branches()
        return [(branch, shared_tokens(branch, everybody, size)) for branch in book.of(namespace, agent)]

    branches = parts.intake.call(look).result()
    is_here = parts.backend is None
    hot = parts.loop.call(lambda core: hot_tokens(core.cache, [branch for branch, _ in branches])).result()
    is_durable = parts.is_in_place()
    return tuple(
        BranchInfo(
            number=branch.number,
            num_tokens=branch.num_tokens,
            saved_tokens=branch.saved_tokens if is_durable else 0,
            hot_tokens=num_hot if is_here else 0,
            warm_tokens=max(0, branch.saved_tokens - num_hot) if is_durable and is_here else 0,
            shared_tokens=num_shared,
            shared_with=agents,
            last_use=branch.last_use,
            num_turns=len(branch.turn_ends),
        )
        for (branch, (num_shared, agents)), num_hot in zip(branches, hot, strict=True)
    )


def latest_ids(parts: Components, namespace: str, agent: str) -> tuple[int, ...]:
    """Return the ids of the branch an agent used last, here or else at another replica; raises NotFound if it has none
    that can be read."""
    branches = parts.intake.call(lambda: parts.memory.know_agent(namespace, agent)).result()
    if not branches and parts.imports is not None:
        parts.imports.named(namespace, agent, lambda work: parts.intake.call(work).result())
        branches = parts.intake.call(lambda: parts.memory.know_agent(namespace, agent)).result()
    if not branches:
        raise NotFound(f"no agent {agent!r}", param="agent")
    return tuple(branches[0].ids.tolist())


def offload(parts: Components, namespace: str, agent: str) -> int:
    """Make an agent durable and evict its blocks from memory, unless they are shared; return how many.

    StoreError if not all of it can be saved, and then nothing is evicted. BadRequest if another server computes.
    """
    if parts.backend is not None:
        raise BadRequest("offload: the memory is that of the server that computes, which decides what stays hot")
    _check_place(parts)
    branches = parts.intake.call(lambda: parts.agent_commands.branches_to_offload(namespace, agent)).result()
    if not branches:
        raise NotFound(f"no agent {agent!r}", param="agent")
    _save_rest(parts, namespace, agent)
    is_flushed = parts.flush(FLUSH_S)
    unsaved = parts.intake.call(lambda: parts.agent_commands.unsaved(namespace, agent)).result()
    if parts.store is not None and (unsaved or not is_flushed):
        raise _not_saved(agent, "none of it was offloaded")
    return parts.loop.call(lambda core: _evict(core, namespace, agent, branches)).result()


def _save_rest(parts: Components, namespace: str, agent: str) -> None:
    """Queue again the blocks of an agent that are in memory and not on disk: a failed save may succeed now."""
    unsaved = parts.intake.call(lambda: parts.agent_commands.unsaved(namespace, agent)).result()
    if unsaved:
        parts.loop.call(lambda core: _save_branches(core, unsaved)).result()


def _check_open(parts: Components) -> None:
    """Raise StoreError if the store is enabled but could not be opened."""
    if parts.refused is not None:
        raise StoreError(f"nothing can be saved or deleted: {parts.refused}; then start again")


def _check_place(parts: Components) -> None:
    """Raise StoreError if nothing can be made durable."""
    _check_open(parts)
    if not parts.is_in_place():
        raise StoreError("the store's directory was removed or replaced, so nothing can be saved: start again")


def _not_saved(agent: str, so: str) -> StoreError:
    return StoreError(
        f"agent {agent!r} cannot be saved, so {so}: check free space, permissions and the disk of the store's "
        "directory (/health/ready says more), then try again"
    )


def fork(parts: Components, namespace: str, source: str, target: str) -> None:
    """Give `target` everything `source` remembers, durably; after a StoreError there is no `target`."""
    _check_place(parts)
    _save_rest(parts, namespace, source)
    copies, command = parts.intake.call(lambda: parts.agent_commands.fork(namespace, source, target)).result()
    if parts.store is not None:
        _done_or_undone(
            parts, command.done, lambda: parts.agent_commands.undo_fork(copies), _not_saved(source, "it is not forked")
        )


def rewind(parts: Components, namespace: str, agent: str, turns: int) -> int:
    """Take back an agent's last turns, durably; return how many tokens it still remembers.

    After a StoreError it remembers everything as before.
    """
    _check_place(parts)
    _save_rest(parts, namespace, agent)
    rewound = parts.intake.call(lambda: parts.agent_commands.rewind(namespace, agent, turns)).result()
    if parts.store is not None:
        undo, refusal = lambda: parts.agent_commands.undo_rewind(rewound), _not_saved(agent, "it is not rewound")
        if isinstance(rewound.command, Move):
            _done_or_undone(parts, rewound.command.done, undo, refusal)
        else:
            _undone_if_refused(parts, rewound.command.done, undo)
    return rewound.num_tokens


def _done_or_undone(parts: Components, done: Future[bool], undo: Callable[[], None], refusal: StoreError) -> None:
    """Wait for the store; if it did not carry out the command, undo it in the book and raise `refusal`."""
    if not _undone_if_refused(parts, done, undo):
        parts.intake.call(undo).result()
        raise refusal


def _undone_if_refused(parts: Components, done: Future[T], undo: Callable[[], None]) -> T:
    """Return the store's answer; on an error, undo the change in the book and raise."""
    try:
        return _answer(done, FLUSH_S)
    except RekindleError:
        parts.intake.call(undo).result()
        raise


def _evict(core: Core, namespace: str, agent: str, branches: Sequence[Branch]) -> int:
    evict_hashes(core.cache.pool, core.background.forget(namespace, agent))  # it would keep its ancestors in memory
    known = [branch for branch in branches if isinstance(branch, KnownBranch)]
    return sum(core.cache.evict_chain(branch.root, branch.ids, branch.hashes) for branch in known)


def delete(parts: Components, namespace: str, agent: str) -> None:
    """Forget an agent on every tier; blocks shared with others stay."""
    _check_open(parts)
    began = time.time()
    before, commands = parts.intake.call(lambda: parts.agent_commands.delete(namespace, agent)).result()
    if parts.store is not None:
        _carried_out(parts, [command.done for command in commands], before, FLUSH_S, began)
    parts.loop.call(lambda core: _evict(core, namespace, agent, before.branches)).result()


def purge_forgotten(parts: Components, namespace: str, agent: str, purged_at: float) -> bool:
    """Purge what is here of an agent that another replica has forgotten, unless it was used since (wall clock); return
    whether it was."""
    branches = parts.intake.call(lambda: parts.memory.book.of(namespace, agent)).result()
    if not branches or branches[0].last_use > purged_at:
        return False
    try:
        purge(parts, namespace, agent)
    except RekindleError as error:
        logger.error("agent %s, which another replica has purged, could not be purged here: %s", agent, error)
    return True


def purge(parts: Components, namespace: str, agent: str) -> PurgeReport:
    """Forget an agent, overwrite its KV in memory and on disk, and read the disk back as zeros.

    Memory is overwritten once the store has forgotten the agent: if the store refuses, nothing has changed.
    """
    _check_open(parts)
    began = time.time()
    idle = parts.loop.call(lambda core: idle_hashes(core.cache.pool)).result()
    before, asked = parts.intake.call(lambda: parts.agent_commands.purge(namespace, agent, idle)).result()
    parts.loop.call(lambda core: withdraw(core, asked)).result()
    proofs = _proofs(parts, asked, before, began) if parts.store is not None else []
    num_hot = _wiped(parts, asked)
    slots_freed, bytes_zeroed = sum(each.slots_freed for each in proofs), sum(each.bytes_zeroed for each in proofs)
    num_shared = proofs[-1].blocks_shared if proofs else 0
    return PurgeReport(agent, slots_freed, bytes_zeroed, num_shared, num_hot, _num_left(parts, asked))


def _wiped(parts: Components, asked: HotPurge) -> int:
    """Overwrite the purged blocks in memory, except those in use again; return how many were overwritten."""
    claimed = asked.claimed | parts.intake.call(parts.agent_commands.claimed).result()
    return parts.loop.call(lambda core: wipe(core, replace(asked, claimed=claimed))).result()


def _proofs(parts: Components, asked: HotPurge, before: Before, began: float) -> list[PurgeProof]:
    """Return what the store read back.

    If the store refuses to forget the agent, the agent is as before. If it has forgotten it, or still may, the agent
    stays listed so that it can be purged again, and nothing of it is left in memory.
    """
    outcomes = [_outcome(command.done) for command in (*asked.breakpoints, asked.command)]
    errors = [each for each in outcomes if isinstance(each, RekindleError)]
    key, unproved = (asked.command.namespace, asked.command.agent), parts.agent_commands.unproved
    if not errors:
        parts.intake.call(lambda: unproved.discard(key)).result()
        _save_again(parts, began)
        return [each for each in outcomes if not isinstance(each, RekindleError)]
    is_refused = len(errors) == len(outcomes) and not any(isinstance(each, PurgeUnproved) for each in errors)
    if not is_refused:
        parts.intake.call(lambda: unproved.add(key)).result()
        _wiped(parts, asked)
        before = before.without_ids()  # a purge without proof must not make the text findable again
    parts.intake.call(lambda: parts.agent_commands.restore(before)).result()
    if is_refused:
        _save_rest(parts, *key)  # queue again what was withdrawn
    raise errors[-1]


def _outcome(done: Future[PurgeProof]) -> PurgeProof | RekindleError:
    try:
        return done.result(PROOF_S)
    except FutureTimeout:
        return PurgeUnproved(f"the store did not answer within {PROOF_S:.0f} s, and may forget the agent still")
    except RekindleError as error:
        return error


def _num_left(parts: Components, purged: HotPurge) -> int:
    """Count the blocks of a purged agent that are still in memory."""
    return parts.loop.call(
        lambda core: sum(core.cache.pool.block_of(block_hash) is not None for block_hash in purged.own)
    ).result()


def pin(parts: Components, namespace: str, agent: str, ttl_s: float | None) -> None:
    """Keep an agent from being forgotten for `ttl_s` seconds from now; None: forever."""
    if ttl_s is not None and not ttl_s > 0:
        raise BadRequest(f"an agent is pinned for more than 0 seconds, not {ttl_s}", param="ttl_s")
    _pin(parts, namespace, agent, math.inf if ttl_s is None else time.time() + ttl_s)


def unpin(parts: Components, namespace: str, agent: str) -> None:
    """Let an agent expire again; a no-op for one that is not pinned."""
    _pin(parts, namespace, agent, 0.0)


def _pin(parts: Components, namespace: str, agent: str, until: float) -> None:
    _check_place(parts)
    _save_rest(parts, namespace, agent)
    command, before = parts.intake.call(lambda: parts.agent_commands.pin(namespace, agent, until)).result()
    if parts.store is None:
        return
    is_known = _undone_if_refused(parts, command.done, lambda: parts.agent_commands.undo_pin(command, before))
    if until and not is_known:  # what is not on disk is not pinned there either
        parts.intake.call(lambda: parts.agent_commands.undo_pin(command, before)).result()
        raise _not_saved(agent, "it is not pinned")


def _answer(done: Future[T], timeout_s: float) -> T:
    try:
        return done.result(timeout_s)
    except FutureTimeout:
        raise StoreError(f"the store did not answer within {timeout_s:.0f} s; try again") from None


def _carried_out(
    parts: Components, done: Sequence[Future[T]], before: Before, timeout_s: float, began: float
) -> list[T]:
    """Return the store's answers; on an error restore what it could not forget, so that the call can be retried."""
    try:
        answers = [_answer(each, timeout_s) for each in done]
    except RekindleError:
        parts.intake.call(lambda: parts.agent_commands.restore(before)).result()
        raise
    _save_again(parts, began)
    return answers


def _save_again(parts: Components, began: float) -> None:
    """Queue again the turns that ended since a deletion `began`: they may depend on blocks that it removed.

    Earlier turns were in the store's queue before it; what was evicted of them for lack of disk space stays evicted.
    """
    unsaved = parts.intake.call(lambda: parts.memory.unsaved(began)).result()
    if unsaved:
        parts.loop.call(lambda core: _save_branches(core, unsaved)).result()
    parts.flush(FLUSH_S)


def _save_branches(core: Core, branches: Sequence[Branch]) -> None:
    for branch in branches:
        if isinstance(branch, KnownBranch):
            core.cache.save_again(branch.root, branch.ids, branch.hashes, branch.head)
            for record in to_save([branch], core.cache.pool.block_tokens):
                core.cache.saving.add(record)
