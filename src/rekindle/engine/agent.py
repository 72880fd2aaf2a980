"""One agent as a handle, as `Engine.agent` gives it.

Owns nothing: it has the id, and passes calls on to the running engine. Creating a handle creates no agent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import BinaryIO, Unpack

from rekindle.agent_ids import check_new_agent_id
from rekindle.cache.blocks.hashing import Ids
from rekindle.engine.agent_admin import AgentAdmin
from rekindle.engine.agent_files import AgentFiles, Kv
from rekindle.engine.calls import (
    ChatKeywords,
    GenerateKeywords,
    Messages,
    PrefillKeywords,
    chat_request,
    pieces,
    prefill_request,
    text_request,
    whole,
)
from rekindle.engine.components import Components
from rekindle.engine.generation import Generation
from rekindle.engine.intake.object_tier import Forgotten
from rekindle.engine.types import AgentInfo, ChatResult, Delta, GenerationRequest, Imported, PurgeReport, Report
from rekindle.errors import NotFound


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent of an engine: a named memory that its chats continue, which may not exist yet.

        from rekindle import Engine

        with Engine(store="off") as engine:
            ada = engine.agent("ada")
            ada.chat([{"role": "user", "content": "Remember the copper key."}], max_tokens=8)
            eve = ada.fork("eve")
            print(eve.info().num_tokens, ada.why()[0].outcome)

    Every method may be called from any thread while the engine runs. NotFound if a memory is needed and there is none;
    StoreError if a durable change is refused by the disk, and then nothing has changed.
    """

    id: str
    namespace: str
    _submit: Callable[[GenerationRequest], Generation] = field(repr=False)
    _parts: Callable[[], Components] = field(repr=False, compare=False)

    @property
    def _admin(self) -> AgentAdmin:
        return AgentAdmin(self._parts(), self.namespace, self.id)

    def stream(self, messages: Messages, **options: Unpack[ChatKeywords]) -> Generation:
        """Chat; iterate the result with `for` or `async for`. Options and errors as in `Engine.stream`."""
        parts = self._parts()
        defaults, form = parts.sampling, parts.reply_format
        return self._submit(
            chat_request(messages, self.id, self.namespace, defaults=defaults, form=form, sees=parts.sees, **options)
        )

    def chat(self, messages: Messages, **options: Unpack[ChatKeywords]) -> ChatResult:
        """Return the whole reply to `messages`, with options as in `stream`."""
        return self.stream(messages, **options).result()

    async def achat(self, messages: Messages, **options: Unpack[ChatKeywords]) -> ChatResult:
        """As `chat`, without blocking the event loop; cancelling the task cancels the work."""
        return await whole(self.stream(messages, **options))

    def astream(self, messages: Messages, **options: Unpack[ChatKeywords]) -> AsyncIterator[Delta]:
        """Iterate over the deltas of the reply; work begins with the first step, closing the iterator cancels it."""
        return pieces(lambda: self.stream(messages, **options))

    def generate(self, prompt: str | Ids, **options: Unpack[GenerateKeywords]) -> ChatResult:
        """Continue a text or ids u32 [n], with options as in `Engine.generate`."""
        request = text_request(prompt, self.id, self.namespace, defaults=self._parts().sampling, **options)
        return self._submit(request).result()

    def prefill(self, messages: Messages, **options: Unpack[PrefillKeywords]) -> Report:
        """Compute and remember a prompt and wait for it, as `Engine.prefilling` does; return its report."""
        sees = self._parts().sees
        return self._submit(prefill_request(messages, self.id, self.namespace, sees=sees, **options)).result().report

    def load(self) -> Report:
        """Load what is stored of the branch used last into memory, as far as it fits; compute nothing. An agent that
        only other replicas know is imported from the object tier first.

        `computed_tokens` of the report is what would have to be computed.
        """
        ids = self._admin.latest_ids()
        request = GenerationRequest(token_ids=ids, agent=self.id, namespace=self.namespace, task="load")
        return self._submit(request).result().report

    def fork(self, target: str) -> Agent:
        """Give `target` everything this agent remembers and return it; no KV is copied. Durable when this returns.

        BadRequest if `target` has a memory; after a StoreError it has none.
        """
        self._admin.fork(check_new_agent_id(target, where="target"))
        return Agent(target, self.namespace, self._submit, self._parts)

    def export(self) -> Iterator[bytes]:
        """Return its file piece by piece: its texts and their KV, to be imported by another engine. NotFound.

        with open("ada.agent", "wb") as file:
            file.writelines(engine.agent("ada").export())
        """
        return AgentFiles(self._parts(), self.namespace, self.id).export()

    def import_file(self, open_file: Callable[[], BinaryIO], *, kv: Kv = "same_model") -> Imported:
        """Become the agent in a file, which `open_file` opens two or three times; durable when this returns.

        Its KV comes along if the same model computed it in the same form, else its texts alone, as the result says:
        with `kv` "off" always. BadRequest with the reason, and nothing has changed, if the file is damaged, if its
        token ids mean other texts to this model, or if this agent has a memory.
        """
        return AgentFiles(self._parts(), self.namespace, check_new_agent_id(self.id, where="id")).take_in(
            open_file, kv=kv
        )

    def rewind(self, turns: int = 1) -> int:
        """Take back the last turns, durably; return how many tokens are still remembered.

        BadRequest if there are fewer turns.
        """
        return self._admin.rewind(turns)

    def info(self) -> AgentInfo:
        """Return what it remembers and on which tier, branch by branch; sizes in tokens."""
        return self._admin.info()

    def why(self) -> list[Report]:
        """Return the reports of its last requests since the engine started, 8 at most, the newest first.

        Each has what was reused and how long it took, and in its `explanation` why not more. NotFound for an agent with
        neither a request nor a memory.
        """
        reports = self._parts().reports.of(self.namespace, self.id)
        if not reports:
            self.info()
        return reports

    def offload(self) -> int:
        """Make it durable and evict its blocks from memory, unless they are shared; return how many.

        StoreError if not all of it can be saved: then nothing is evicted. A turn that ends meanwhile stays.
        """
        return self._admin.offload()

    def delete(self) -> None:
        """Forget it on every tier and, with an object tier, on every replica; blocks shared with others stay."""
        parts = self._parts()
        was_elsewhere = _forgotten_elsewhere(parts, self.namespace, self.id)
        try:
            self._admin.delete()
        except NotFound:
            if was_elsewhere is None:
                raise
        finally:
            parts.reports.forget(self.namespace, self.id)

    def purge(self) -> PurgeReport:
        """Forget it and overwrite its KV in memory and on disk; the disk is read back as proof.

        Blocks shared with others stay. A request of the agent that is running continues, and what it leaves is the
        beginning of the agent's new memory: purge again after it.
        """
        parts = self._parts()
        parts.reports.forget(self.namespace, self.id)  # even if the disk refuses: they quote its prompts
        was_elsewhere = _forgotten_elsewhere(parts, self.namespace, self.id)
        try:
            report = self._admin.purge()
        except NotFound:
            if was_elsewhere is None:
                raise
            report = PurgeReport(self.id, 0, 0, 0, 0)
        finally:
            parts.reports.forget(self.namespace, self.id)  # those of requests that ended meanwhile
        if was_elsewhere is None:
            return report
        deleted, shared = was_elsewhere.objects_deleted, was_elsewhere.objects_shared
        return replace(report, tier_objects_deleted=deleted, tier_objects_shared=shared)

    def pin(self, *, ttl_s: float | None = None) -> None:
        """Keep it from being forgotten by age or for lack of disk space, for `ttl_s` seconds (None: until `unpin`).

        Pinning again replaces the time. Durable when this returns; after a StoreError it is pinned as before.
        """
        self._admin.pin(ttl_s)

    def unpin(self) -> None:
        """Let it expire again."""
        self._admin.unpin()


def _forgotten_elsewhere(parts: Components, namespace: str, agent: str) -> Forgotten | None:
    """Forget an agent in the object tier, if there is one, before it is forgotten here: otherwise it would come back.
    None: it was not there."""
    if parts.tier is None:
        return None
    is_here = parts.intake.call(lambda: bool(parts.memory.book.of(namespace, agent))).result()
    return parts.tier.forget(namespace, agent, is_here=is_here)
