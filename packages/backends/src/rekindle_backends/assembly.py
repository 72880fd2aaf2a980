"""Builds an engine whose requests another server computes: texts, agents and their store are here, weights are not.

Its blocks stand for texts: each has a few bytes, so that everything that keeps branches on disk, forgets, purges and
limits them is the same as for blocks of KV. Its fingerprint covers what token ids depend on, and not the weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from rekindle.compute.cpu.memory import memory_of
from rekindle.config import SETTINGS, BackendKind, Settings
from rekindle.engine.builder import Builder, Computing, check_places
from rekindle.engine.capacity import capacity, check_budget, check_disk
from rekindle.engine.components import Components
from rekindle.engine.core.scheduler import Scheduler
from rekindle.errors import BackendFailed, ConfigError
from rekindle.harness.own_server import EndedEarly, OwnServer
from rekindle.kv.arena import KVArena
from rekindle.model.checkpoint import Source
from rekindle.model.described import DescribedModel
from rekindle.model.fingerprint import DigestCache, tokenizer_digest
from rekindle.model.sampling_defaults import SamplingDefaults
from rekindle.spec import KVLayout, LayerSpec, ModelFacts, ModelSpec
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import find_reply_ends
from rekindle_backends.calls import BackendCalls
from rekindle_backends.client import Address, Backend
from rekindle_backends.constraints import BackendConstraints
from rekindle_backends.core import Calls, RemoteCore
from rekindle_backends.llama.calls import LlamaCalls
from rekindle_backends.llama.command import gguf_of, llama_command
from rekindle_backends.llama.gaps import Gaps
from rekindle_backends.llama.joined import JoinedServer, check_joinable
from rekindle_backends.llama.keeping import STEP_TOKENS
from rekindle_backends.llama.layout import BLOCK_TOKENS, Unsupported
from rekindle_backends.llama.memory import SlotMemory
from rekindle_backends.llama.probe import ProbedSlots, described, flags_and_files, probe
from rekindle_backends.llama.sections import SlotFileError
from rekindle_backends.llama.served import LlamaServed
from rekindle_backends.llama.slot_folder import GivenFolder, RamDisk, SlotFolder
from rekindle_backends.llama.states import States
from rekindle_backends.memory import Memory, TextMemory
from rekindle_backends.served import Served, check_tokens
from rekindle_backends.vllm_command import vllm_command

logger = logging.getLogger(__name__)
NUM_BLOCKS = 1 << 15  # texts of 2 million tokens that are not durable yet, in 8 MiB
TEXT_VERSION = 1


def assemble_front(
    settings: Settings, *, clock: Callable[[], datetime] = datetime.now, before_store: Callable[[], None] = lambda: None
) -> Components:
    """Read the model's small files, ask the backend what it serves, open the store; all or nothing.

    `before_store` is called first: a backend of our own, and its slots, are one process's at a time, as the store is.
    """
    started = {"imports": time.time()}
    before_store()
    _check_settings(settings)
    use_store = settings.store.enabled and settings.cache.reuse == "on"
    check_places(settings, use_store=use_store)
    source = Source.find(settings.model.model, settings.model.revision)
    directory = source.fetch_texts()
    described = DescribedModel.read(directory)
    encoder = PromptEncoder.from_dir(directory, clock=clock)
    sampling = SamplingDefaults.read(directory, settings.model.sampling)
    digest = tokenizer_digest(directory, DigestCache(None))
    with ExitStack() as opened:
        folder = _slot_folder(settings, opened)
        own = _own(settings, source, folder, use_store=use_store)
        closing = opened.pop_all()
    backend = _backend(settings, own, closing)
    backend.start()
    try:
        found = _found(settings, backend, (source.name, settings.model.model or "", str(directory)), encoder)
        slots = _KeptSlots.find(settings, source, backend, found.llama, own, folder)
        started["weights"] = time.time()
        file = gguf_of(source) if settings.backend.keeps_slots else source.file
        spec = _spec(settings, source.name, described, digest, found.max_context, slots.probed, file)
        spec = replace(spec, eos_ids=spec.eos_ids | find_reply_ends(encoder))
        if use_store:
            check_disk(settings.store, spec)
        computing = _computing(settings, spec, encoder, backend, found, slots, sampling, closing)
        components = Builder(settings, computing, started, use_store=use_store).components
    except BaseException:
        backend.stop()
        raise
    backend.watch(found.served.difference)
    return components


def _check_settings(settings: Settings) -> None:
    """Raise ConfigError for settings of what computes: here they would do nothing."""
    keeps_slots = settings.backend.keeps_slots
    if keeps_slots and settings.cache.block_tokens != BLOCK_TOKENS:
        raise ConfigError(f"block_tokens: slots of llama.cpp are cut into blocks of {BLOCK_TOKENS}: leave it out")
    for name, known in SETTINGS.items():
        if name == "hot_bytes" and keeps_slots:
            continue
        if known.about.computing and getattr(getattr(settings, known.section), known.field) != known.default:
            raise ConfigError(f"{name}: another server computes (backend); set it there, if it has the like")


@dataclass(frozen=True, slots=True)
class _Found:
    """What a backend was found to be; `note` is a sentence about it for users."""

    served: Served
    max_context: int | None
    note: str
    llama: LlamaServed | None = None

    def calls(self, kind: BackendKind, spec: ModelSpec, encoder: PromptEncoder, secret: bytes) -> Calls:
        """Return what writes requests for it."""
        if self.llama is None:
            return BackendCalls(kind, self.served.name, secret)
        pieces = map(encoder.vocabulary.shown, range(spec.vocab_size))
        return LlamaCalls(self.llama.max_context, Gaps(pieces, spec.eos_ids), self.llama.may_draft)


def _found(settings: Settings, backend: Backend, names: Sequence[str], encoder: PromptEncoder) -> _Found:
    """Ask a backend what it serves, and whether its tokens are ours."""

    def encode(text: str) -> Sequence[int]:
        found: Sequence[int] = encoder.encode(encoder.render_text(text, add_leading=False)).tolist()
        return found

    wanted = settings.backend.model
    if settings.backend.kind == "llama.cpp":
        llama = LlamaServed.find(backend, wanted, names)
        return _Found(llama.served, llama.max_context, llama.check_tokens(backend, encode), llama)
    served = Served.find(backend, wanted, names)
    return _Found(served, served.max_context, check_tokens(backend, served, encode))


@dataclass(frozen=True, slots=True)
class _KeptSlots:
    """The slots of a llama-server, if their states can be blocks; `notes` say what was found of them.

    `num_starts` of it are counted, and `check` says whether it is still the one that was probed.
    """

    folder: SlotFolder | None = None
    probed: ProbedSlots | None = None
    num_starts: Callable[[], int] = lambda: 0
    check: Callable[[], Awaitable[None]] | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def find(
        cls,
        settings: Settings,
        source: Source,
        backend: Backend,
        llama: LlamaServed | None,
        own: OwnServer | None,
        folder: SlotFolder | None,
    ) -> _KeptSlots:
        """Read the state of a few tokens; without one that can be used the server computes, and texts are kept."""
        if folder is None or llama is None:
            return cls()
        digests = DigestCache(settings.store.directory() / "digests.json" if settings.store.enabled else None)
        joined = JoinedServer(backend, folder, llama.num_slots) if own is None else None
        try:
            state = backend.run(probe(backend, folder) if joined is None else joined.join()).result()
            flags = shlex.split(settings.backend.flags or "")
            depends_on = flags_and_files(flags, digests) if joined is None else {"computed": joined.rows}
            depends_on |= {"file": digests.digest(file := gguf_of(source))}
            probed = described(state.shape, file=file, max_context=llama.max_context, depends_on=depends_on)
            if joined is not None:
                check_joinable(probed)
        except (BackendFailed, SlotFileError, Unsupported) as error:
            logger.warning("this llama-server's slots are not kept, only texts: %s", error)
            return cls(notes=(f"its slots are not kept: {error}",))
        notes = (f"its slots are kept: {probed.layout.describe_bytes()}",)
        if joined is not None:
            joined.watch()
        counted = own or joined
        assert counted is not None, "a server is ours or another's"
        return cls(folder, probed, lambda: counted.num_starts, None if joined is None else joined.check, notes)

    def memory(self, parts: Builder, backend: Backend, num_slots: int, closing: ExitStack) -> Memory:
        """Return the memory of these slots, or of texts alone."""
        if self.folder is None or self.probed is None:
            return TextMemory(parts.cache)
        states = States(backend, self.folder, parts.cache.arena, self.probed.shape, check=self.check)
        closing.callback(states.close)
        return SlotMemory(
            backend=backend,
            cache=parts.cache,
            states=states,
            num_slots=num_slots,
            has_reasoning=parts.renderer.form.has_reasoning,
            generation=self.num_starts,
            wake=parts.loop.wake,
            clock=time.perf_counter,
        )

    def arena(self, settings: Settings, spec: ModelSpec) -> KVArena:
        """Return hot memory for the rows of the slots, or for texts."""
        if self.probed is None:
            return KVArena(spec.layout, max(NUM_BLOCKS, 2 * -(-spec.max_context // spec.layout.block_tokens)))
        memory = memory_of("cpu")
        check_budget(settings.cache, "cpu", memory)
        hot = capacity(settings.cache, spec, memory, chunk_tokens=STEP_TOKENS)
        return KVArena(spec.layout, hot.num_blocks, windows=hot.windows)


def _slot_folder(settings: Settings, closing: ExitStack) -> SlotFolder | None:
    """Return where states of slots pass through; None where none are kept."""
    if not (settings.backend.keeps_slots and settings.cache.reuse == "on"):
        return None
    given = settings.backend.slots
    folder = RamDisk() if given is None else GivenFolder(given)
    closing.callback(folder.close)
    return folder


def _backend(settings: Settings, own: OwnServer | None, closing: ExitStack) -> Backend:
    given = settings.backend
    url, key = (given.url, given.key) if own is None else (own.command.url, own.command.key or given.key)
    return Backend(Address(url, key, given.silence_s), own=own, closing=closing)


def _own(settings: Settings, source: Source, folder: SlotFolder | None, *, use_store: bool) -> OwnServer | None:
    """Start a server, if that is asked for; None: the backend is another's.

    A vLLM gets our connector, with its records next to the texts.
    """
    if not settings.backend.is_own:
        return None
    flags = shlex.split(settings.backend.flags or "")
    if settings.backend.kind == "llama.cpp":
        # Its own cache of states in memory would only double what is kept here.
        kept = () if folder is None else ("--slot-save-path", f"{folder.path}/", "--cache-ram", "0")
        file, most = gguf_of(source), settings.engine.max_context
        command = llama_command(file, flags=flags, max_context=most, arguments=kept)
    else:
        if settings.store.slot == "auto":
            raise ConfigError("slot: a vLLM that is started here needs to know its slot: write its number")
        records = settings.store.own_directory() / "vllm" if use_store else None
        command = vllm_command(source.fetch(), source.name, flags=flags, records=records)
    own = OwnServer(command)
    try:
        own.start()
    except EndedEarly as error:
        raise ConfigError(f"backend: {error}: what it wrote last says why; its flags are in backend_flags") from error
    return own


def _computing(
    settings: Settings,
    spec: ModelSpec,
    encoder: PromptEncoder,
    backend: Backend,
    found: _Found,
    slots: _KeptSlots,
    sampling: SamplingDefaults,
    closing: ExitStack,
) -> Computing:
    kind = settings.backend.kind
    num_slots = found.llama.num_slots if found.llama is not None else 0

    def new_core(parts: Builder) -> RemoteCore:
        return RemoteCore(
            backend=backend,
            calls=found.calls(kind, spec, encoder, parts.cache.secret),
            cache=parts.cache,
            memory=slots.memory(parts, backend, num_slots, closing),
            scheduler=Scheduler(settings.engine, parts.costs, max_chunk_tokens=1),
            vocab_size=spec.vocab_size,
            min_reuse_tokens=settings.cache.min_reuse_tokens,
            on_turn=parts.intake.turn_ended,
            wake=parts.loop.wake,
        )

    return Computing(
        device="cpu",
        spec=spec,
        encoder=encoder,
        arena=slots.arena(settings, spec),
        max_context=spec.max_context,
        notes=(f"computed by {found.served.name} at {backend.url} ({kind}); {found.note}", *slots.notes),
        promise="none",
        label=f"{spec.name} ({'texts of a front' if slots.probed is None else 'slots of llama.cpp'})",
        sampling=sampling,
        new_core=new_core,
        new_constraints=lambda encoder, form: BackendConstraints(kind, form),
        backend=backend,
        has_kv=slots.probed is not None,
    )


def _spec(
    settings: Settings,
    name: str,
    described: DescribedModel,
    tokenizer: str,
    max_context: int | None,
    probed: ProbedSlots | None,
    file: Path | None,
) -> ModelSpec:
    """Return what is known of the model; a block of texts alone has the smallest layer that there can be.

    `file` has its weights, if they are in one here.
    """
    given = (settings.engine.max_context, described.max_context, max_context)
    limits = [each for each in given if each is not None]
    if not limits:
        raise ConfigError("max_context: neither config.json nor the backend says how long prompts may be: set it")
    layer = LayerSpec(0, 1, 1, 1, None, "bf16", "bf16")
    identity: dict[str, object] = {"texts": TEXT_VERSION, "tokenizer": tokenizer}
    if probed is None:
        identity |= {"architecture": described.architecture, "model": name}
    else:
        identity |= probed.identity
    layout = KVLayout(settings.cache.block_tokens, (layer,)) if probed is None else probed.layout
    hasher = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=32, person=b"rekindle-front")
    hasher.update(layout.digest)
    return ModelSpec(
        name=name,
        architecture=described.architecture,
        vocab_size=described.vocab_size,
        max_context=min(limits),
        eos_ids=described.eos_ids,
        fingerprint=hasher.digest(),
        layout=layout,
        facts=_facts(described, file),
    )


def _facts(described: DescribedModel, file: Path | None) -> ModelFacts:
    """What a front says of weights that another server has: what their file shows, if it is a GGUF file."""
    if file is None:
        return ModelFacts(described.family, 0, "safetensors", 0, 0, "native")
    return ModelFacts(described.family, 0, "gguf", file.stat().st_size, 0, "native")
