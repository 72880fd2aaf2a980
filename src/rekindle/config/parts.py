"""The settings of what computes and keeps: names, defaults, meanings, bounds. Each is defined here, once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rekindle.config.access import check_secret, master_key
from rekindle.config.setting import Bounds, above, at_least, check_fields, computing, need, setting
from rekindle.config.store_places import check_slot, data_directory, slot_directory, store_directory

MiB = 1 << 20
SESSIONS_FILE = "sessions.db"
RESPONSES_FILE = "responses.db"
# Defaults where nothing is set: shares of free memory, and of free disk space plus what the store already uses.
HOT_SHARE, MOST_HOT_BYTES = 1 / 4, 4096 * MiB
DISK_SHARE, MOST_DISK_BYTES = 1 / 5, 50 * 10**9
WORDS_SHARE = 1 / 8  # of the disk, for coordination sessions, and again for stored responses
KVSetting = Literal[
    "auto", "q4h", "q8h", "bf16", "fp32", "q4h/q8h", "q8h/q4h", "bf16/q4h", "bf16/q8h", "q4h/bf16", "q8h/bf16"
]
NORMALISATIONS = ("attribution", "dates", "tools", "tail", "compaction")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, in which precision, on which device. Remote code is never trusted."""

    model: str | None = setting(
        None,
        "directory, hub name or smollm2",
        detail="`smollm2` is SmolLM2-135M-Instruct, `ollama:NAME` the GGUF file of a model that Ollama has. The bare "
        "argument of a command is the same. No remote code is run.",
        unset="pocket, the bundled one",
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub model", unset="its default branch")
    device: str = computing(
        "auto",
        "where the model computes: cpu, cuda, cuda:1, mps, or auto: on a card if kernels of ours run there",
        detail="See [gpu.md](gpu.md).",
    )
    dtype: Literal["auto", "bf16", "fp32"] = computing("auto", "precision of the model; auto: what the checkpoint has")
    kv: KVSetting = computing(
        "auto",
        "format of the KV cache, or those of K and of V; auto: the fewest bits that change next to nothing",
        detail="`q4h` is the 4-bit format, `q8h` the 8-bit one; `q8h/q4h` keeps K in 8 bits and "
        "V in 4. `auto` gives single layers 8 or 16 bits until, on a text, next tokens stay within a KL of 0.007.",
    )
    weights: Literal["native", "int8", "int4", "auto", "bnb-4bit", "bnb-8bit"] = computing(
        "native",
        "precision of linear layers: the checkpoint's, 8 bits, 4 bits, auto: 8 where that changes next to nothing or a "
        "card has no room for more, or those of bitsandbytes",
        detail="`int8` halves the memory of linear layers in bf16 and needs kernels of ours; a tied embedding stays as "
        "it is. `int4` takes about a quarter, with the head in 8 bits, and changes what a model says: of the bundled "
        "one, 3 % of first choices. `auto` takes `int8` where, on a text of 512 tokens, the distributions of next "
        "tokens stay within a KL of 0.002 and 99 % of first choices are the same; on a card it means the most bits "
        "that there is room for ([gpu.md](gpu.md#what-runs-how)). Of a GGUF file `native` keeps the codes as they are "
        "where the kernels for the CPU can; other quantised weights that would be widened are packed in 8 bits. "
        "`bnb-4bit` (nf4) and `bnb-8bit` let bitsandbytes quantise a bf16 checkpoint, on the CPU or CUDA; the head "
        "keeps 16 bits, and experts of mixtures are in `int4` or `int8` where the kernels for the CPU compute.",
    )
    kernels: Literal["auto", "amx", "avx512", "avxvnni", "avx2", "torch"] = computing(
        "auto",
        "CPU kernels, by their instructions, or torch alone; auto: the fastest that run here, also on a card",
        detail="Kernels that cannot run are an error. `rekindle doctor` says which ones run, and what is missing.",
    )
    sampling: Literal["model", "openai"] = setting(
        "model",
        "where the sampling of requests that do not say comes from: the model's makers, or OpenAI's habits alone",
        detail="`model` takes what generation_config.json or a GGUF file has of it. [http.md](http.md#requests) says "
        "which parameters these are, and what applies to the rest.",
    )
    threads: int | None = computing(
        None,
        "threads of the model",
        unset="all cores",
        bounds=at_least(1, 1024),  # a system that runs out of threads kills the process
    )
    # Weights from 64 MiB on are kept in a file in the store's directory and mapped at later starts.
    map_weights: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        need(self.model is None or bool(self.model.strip()), "model is empty: name a directory or a hub model")
        need(bool(self.device), "device is empty: write auto, cpu or cuda")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Hot memory and matching."""

    hot_bytes: int | None = computing(
        None,
        "memory for hot KV, as 512MB or 4GiB",
        unset="a quarter of what is free, at most 4GiB; on a card what the weights leave",
        bounds=at_least(1),
    )
    block_tokens: int = setting(64, "tokens in a block", bounds=Bounds(choices=(16, 32, 64, 128, 256)))
    reuse: Literal["on", "off"] = setting("on", "reuse stored KV", detail="`off`: every prompt is computed.")
    max_branches: int = setting(
        8,
        "conversations kept per agent",
        detail="Single requests that no conversation has much in common with, such as those for a title, are dropped "
        "first. `n` of a request cannot be more.",
        bounds=at_least(1),
    )
    min_reuse_tokens: int = 16  # fewest tokens worth reusing
    text_index_bytes: int | None = None  # memory for finding prompts by their text

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def index_bytes(self) -> int:
        """Memory for finding prompts by their text: 256 MiB, or a quarter to a sixteenth of `hot_bytes` if given."""
        if self.text_index_bytes is not None:
            return self.text_index_bytes
        hot = MOST_HOT_BYTES if self.hot_bytes is None else self.hot_bytes
        return max(min(256 * MiB, hot // 4), hot // 16)


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """What is done to prompts so that they stay the same from turn to turn."""

    normalise: str = setting(
        "attribution,tail,compaction",
        f"remove what clients change on every call: {', '.join(NORMALISATIONS)}, or off",
        detail="Several are separated by commas. `tools` sorts the tools instead of removing something; `tail` moves "
        "what known clients change at the end of a system text to the first user message, and what they say after that "
        "message, always the same, before it; `compaction` keeps an agent's tools and system text in a prompt that is "
        "its history without them, or that quotes its history, if it asks for a summary in words.",
    )
    tail_heading: tuple[str, ...] = setting(
        (),
        "prefix of the line after which a client's system prompt varies (repeatable)",
        detail="With `normalise=tail` everything from that line on moves to the first user message, after the tools. "
        "`rekindle why` finds such lines.",
        unset="those of known clients",
    )
    anticipate: Literal["on", "off"] = setting("on", "compute in idle time what the template renders next")

    def __post_init__(self) -> None:
        check_fields(self)
        unknown = sorted(self.kinds() - set(NORMALISATIONS))
        known = ", ".join(NORMALISATIONS)
        need(not unknown, f"normalise: {', '.join(map(repr, unknown))} is unknown: write off, or some of {known}")
        need(
            all(map(str.strip, self.tail_heading)), "tail_heading is empty: write how the line begins, such as 'Build:'"
        )

    def kinds(self) -> frozenset[str]:
        """The requested kinds; empty with `off`."""
        if self.normalise.strip() == "off":
            return frozenset()
        return frozenset(kind.strip() for kind in self.normalise.split(","))


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The warm tier; there is none if `enabled` is false."""

    dir: Path | None = setting(
        None,
        "directory of the warm tier, or off",
        detail="`off`: nothing survives a restart.",
        unset="the user's cache directory",
        name="store",
    )
    enabled: bool = True
    slot: str = setting(
        "off",
        "store slot for this replica: its number, auto for the first free one, or off",
        detail="`auto` takes over what a stopped replica remembers. See [storage.md](storage.md#replicas).",
    )
    secret: str | None = setting(
        None,
        "what the store's secret is made from, in at least 16 characters: the same for replicas that share memory",
        detail="Equal prompts have equal names where it is equal. A store that was made with another is refused.",
        unset="a random one for each store",
        given="secret",
    )
    key: str | None = setting(
        None,
        "key that encrypts a new store and opens an encrypted one: 64 hexadecimal digits, `openssl rand -hex 32`",
        detail="See [encryption.md](encryption.md).",
        unset="not encrypted",
        given="secret",
        name="store_key",
    )
    key_file: Path | None = setting(
        None, "file that holds the `store_key`, in its place", unset="none", name="store_key_file"
    )
    disk_bytes: int | None = setting(
        None,
        "disk for warm KV in this directory, that of all models and KV formats together",
        detail="For room, stores of models that are not served are removed, the least recently used first.",
        unset="a fifth of what is free, at most 50GB",
        bounds=at_least(1),
    )
    disk_writes_a_day: int | None = setting(
        None,
        "most to write to the store on a day (UTC), as 20GB; then nothing is saved until the next",
        detail="Turns stay in memory meanwhile; deletions and purges are still written. "
        "See [storage.md](storage.md#disk-wear).",
        unset="no limit",
        bounds=at_least(1),
    )
    agent_ttl_s: float | None = setting(None, "forget agents unused for this long", unset="never", bounds=at_least(1))
    anonymous_ttl_s: float = setting(3600.0, "forget unnamed conversations unused for this long", bounds=at_least(1))
    save_unnamed: Literal["reused", "always"] = setting(
        "reused",
        "when unnamed conversations are written to disk: once a second request continues or reuses them, or always",
        detail="What was seen once stays in memory. Agents are always written, and prompts with breakpoints.",
    )
    namespace_share: float = setting(
        1.0,
        "share of disk and hot memory above which a tenant is evicted before others",
        detail="1: no quota. In hot memory blocks count, and by themselves sliding windows and recurrent states.",
        bounds=above(0, 1),
    )
    check_restored: int = computing(
        256,
        "in idle time, compute one of so many blocks restored from disk again and compare its bits; 0: none",
        detail="What differs is dropped, and counted. None is checked where equal ids may give other bits, of models "
        "with recurrent layers, and with an object tier. See [receipts.md](receipts.md#checks).",
        bounds=at_least(0),
    )
    stale_ttl_s: float = 30 * 86400.0  # other models' stores that were unused for this long are removed at start
    staging_bytes: int = 64 * MiB  # for blocks on their way to the disk; there is always room for two of each kind
    readers: int = 2  # threads

    def __post_init__(self) -> None:
        check_fields(self)
        check_slot(self.slot)
        need(1 <= self.readers <= 64, f"readers must be from 1 to 64, not {self.readers}")
        if self.secret is not None:
            check_secret(self.secret)
        if self.key is not None:
            master_key(self.key, self.key_file)

    def master_key(self) -> bytes | None:
        """The key [32] of an encrypted store; None: it is clear. Reads `key_file`, if there is one; ConfigError."""
        return master_key(self.key, self.key_file)

    def directory(self) -> Path:
        """`dir`, or this system's directory for user caches; slots share it."""
        return store_directory(self.dir)

    def own_directory(self) -> Path:
        """The directory of this process's blocks: its slot, or `directory` if there are none. Not with `auto`."""
        return self._own(self.directory())

    def _own(self, directory: Path) -> Path:
        assert self.slot != "auto", "no slot has been claimed"
        return directory if self.slot == "off" else slot_directory(directory, int(self.slot))

    def responses_path(self) -> Path | None:
        """The file of stored responses; None: no file."""
        return self.text_files()[0] if self.enabled else None

    def sessions_path(self) -> Path | None:
        """The file of sessions; None: no file."""
        return self.text_files()[1] if self.enabled else None

    def text_files(self) -> tuple[Path, Path]:
        """Where stored responses and sessions are, also those of an earlier run if the store is off; may be missing.

        Slots share the responses; each has sessions of its own, as their file is open in one process at a time.
        """
        return self.directory() / RESPONSES_FILE, self._own(data_directory(self.dir)) / SESSIONS_FILE


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Scheduling. `max_running` places and hot memory are shared by the active namespaces (`engine/core/shares`)."""

    max_context: int | None = setting(
        None,
        "longest prompt with its answer, in tokens",
        detail="A longer prompt is refused with 400, never cut.",
        unset="the model's",
        bounds=at_least(2),
    )
    max_running: int = setting(32, "requests computed together", bounds=at_least(1))
    max_waiting: int = setting(
        1024,
        "requests that may wait; more are refused with 503",
        detail="A tenant that has less than its share of them may still wait. Prefill for listeners of sessions does "
        "not count, and turns that begin together count as one.",
        bounds=at_least(1),
    )
    request_timeout_s: float | None = setting(
        None, "stop a request that is not done by then; it fails with 503", unset="never", bounds=above(0)
    )
    max_stall_s: float = computing(0.25, "longest stall of a running stream caused by another prompt", bounds=above(0))
    max_chunk_tokens: int | None = computing(
        None,
        "prompt tokens in one step, as far as `max_stall_s` lets it be so long",
        unset="512; on a card 2,048, or 8,192 with more than 40 GB",
        bounds=at_least(1),
    )
    speculate: Literal["auto", "off"] = computing(
        "auto",
        "compute tokens that a stored text continues with along with the next one, where that is faster",
        detail="Replies stay the same, so `auto` is `off` for models whose bits depend on the rows of a step.",
    )
    check_when_idle: bool = False  # every invariant whenever the engine runs out of work: REKINDLE_DEBUG=1

    def __post_init__(self) -> None:
        check_fields(self)
