"""Before a prompt is computed: what other replicas know of it, if that is faster to load than to compute.

First an agent's head, so that its text can be matched though this machine has never seen it; then, of the prompt's
ids, the blocks that the store lacks. Runs on a worker, never on the intake thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict

from rekindle.cache.blocks.hashing import BlockHash, TokenIds
from rekindle.engine.intake.object_tier import Replica
from rekindle.engine.intake.prompt_lookup import Prompt
from rekindle.engine.memory.branches import common_prefix
from rekindle.engine.memory.memory import OnMemory
from rekindle.engine.types import GenerationRequest
from rekindle.store.branch_text import BranchText
from rekindle_tier.heads import AgentHead
from rekindle_tier.imports import Imports, Wanted

logger = logging.getLogger(__name__)
NAMED_S = 80.0  # as if computing took so long: the object store may be silent for five seconds
MOST_HEADS = 256  # of agents whose head was read lately; with windows and states it says which parts blocks have


class PromptImports:
    """Imports for one engine."""

    def __init__(self, imports: Imports, replica: Replica) -> None:
        self._imports = imports
        self._adoption = replica.adoption
        self._store = replica.store
        self._layout = replica.layout
        self._prefill_s = replica.prefill_s
        self._forget = replica.forget
        self._lock = threading.Lock()
        self._heads: OrderedDict[tuple[str, str], tuple[BranchText, ...]] = OrderedDict()

    def agent(self, request: GenerationRequest, prompt: Prompt, on_memory: OnMemory) -> tuple[bool, float]:
        """Take in what others have computed for the request's agent; return whether its prompt may match more now, and
        how many seconds it has waited for the object store."""
        if request.agent is None or prompt.reuse == "off":
            return False, 0.0
        try:
            known = prompt.match.num_tokens
            compute_s = self._prefill_s(len(prompt.ids) - known, known)
            began = time.monotonic()
            head = self._imports.head(request.namespace, request.agent, compute_s=compute_s)
            waited_s = time.monotonic() - began
            took_in = head is not None and self._take_in(request.namespace, request.agent, head, on_memory)
            return took_in, waited_s
        except Exception:
            # Border: what cannot be imported is computed.
            logger.exception("the head of agent %s could not be imported", request.agent)
            return False, 0.0

    def named(self, namespace: str, agent: str, on_memory: OnMemory) -> None:
        """Take in the texts of an agent that a caller asks for by its name, if the tier has any."""
        try:
            head = self._imports.head(namespace, agent, compute_s=NAMED_S)
            if head is not None:
                self._take_in(namespace, agent, head, on_memory)
        except Exception:
            # Border: what cannot be imported is not known here.
            logger.exception("the head of agent %s could not be imported", agent)

    def _take_in(self, namespace: str, agent: str, head: AgentHead, on_memory: OnMemory) -> bool:
        was_forgotten = bool(head.purged_at) and self._forget(namespace, agent, head.purged_at)
        key = (namespace, agent)
        with self._lock:
            self._heads[key] = head.branches
            self._heads.move_to_end(key)
            while len(self._heads) > MOST_HEADS:
                self._heads.popitem(last=False)
        branches = [branch for branch in head.branches if len(branch.ids)]
        return on_memory(lambda: self._adoption.branches(*key, branches)) > 0 or was_forgotten

    def blocks(self, request: GenerationRequest, prompt: Prompt, root: BlockHash, *, waited_s: float) -> int:
        """Store the blocks of a prompt that are missing here and in the tier; return how many. `waited_s`: how long
        the request has waited for the object store before."""
        if prompt.reuse == "off":
            return 0
        try:
            return self._blocks(request, prompt, root, waited_s)
        except Exception:
            # Border: what cannot be imported is computed.
            logger.exception("blocks of agent %s could not be imported", prompt.agent)
            return 0

    def _blocks(self, request: GenerationRequest, prompt: Prompt, root: BlockHash, waited_s: float) -> int:
        branch, num_shared = self._nearest(request, prompt.ids, root)
        if branch is None and self._layout.ending:
            return 0  # nobody knows where the windows and states that it can resume from are
        size = self._layout.block_tokens
        wanted = self._wanted(prompt.ids, root, branch, num_shared)
        num_here = self._store.num_known([each.identity.hash for each in wanted])
        missing = wanted[num_here:]
        num_tokens = sum(each.identity.num_tokens for each in missing)

        def rest_s(num_come: int) -> float:
            return self._prefill_s(num_tokens - num_come, num_here * size + num_come)

        num_named = max(0, num_shared // size - num_here)
        fetched = self._imports.blocks(missing, rest_s=rest_s, num_named=num_named, waited_s=waited_s)
        return self._adoption.blocks(fetched, timeout_s=self._imports.most_s(rest_s(0)))

    def _nearest(self, request: GenerationRequest, ids: TokenIds, root: BlockHash) -> tuple[BranchText | None, int]:
        """Return the text of the agent that shares the most leading ids with a prompt, and their count."""
        branches = self._heads.get((request.namespace, request.agent or ""), ())
        shared = [(common_prefix(branch.ids, ids), branch) for branch in branches if branch.root == root]
        num_shared, branch = max(shared, key=lambda pair: pair[0], default=(0, None))
        return branch, num_shared

    def _wanted(self, ids: TokenIds, root: BlockHash, branch: BranchText | None, num_shared: int) -> list[Wanted]:
        """Return the blocks that a prompt can begin with, but for its last token, which is computed in any case.

        If it extends a branch, these are the branch's, its partial one included; else the full ones.
        """
        size = self._layout.block_tokens
        if branch is not None and num_shared == len(branch.ids) < len(ids):
            blocks = list(branch.blocks(size))
        else:
            usable = (len(ids) - 1) // size * size
            blocks = list(BranchText(root, ids[:usable], 0, 0.0).blocks(size))
        num_named = -(-num_shared // size)
        has = branch.parts if branch is not None else {}
        return [
            Wanted(block, (0, *(part for part, having in has.items() if at < num_named and at in having)))
            for at, block in enumerate(blocks)
        ]
