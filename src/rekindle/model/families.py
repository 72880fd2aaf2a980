"""Families of models: which are served, with which KV and at which promise; what docs/models.md and `rekindle models`
show.

Owns no behaviour: whether a model is served is decided when it is loaded, from what it does. Tests load a tiny model of
every type and compare what it keeps and promises; the layers of examples are those of their configs, and are not
checked. Knows neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rekindle.config import CacheSettings
from rekindle.spec import Format, KVLayout, LayerSpec, StateSpec, StateTensor

BLOCK_TOKENS = CacheSettings().block_tokens
Served = Literal["yes", "text", "no"]
OnCard = Literal["graphs", "kernels", "torch", ""]
Kind = Literal["attention", "windows", "experts", "latents", "convolutions", "delta rule", "mamba", "vision", "refused"]


@dataclass(frozen=True, slots=True)
class Layers:
    """`count` layers of one kind; K and V heads of `dim`."""

    count: int
    heads: int
    dim: int
    window: int | None = None
    k_format: Format = "q4h"
    v_format: Format = "q4h"

    def layer(self, index: int) -> LayerSpec:
        """Describe the one with this index in the model, in the fewest bits that `auto` may take."""
        return LayerSpec(index, self.heads, self.dim, self.dim, self.window, self.k_format, self.v_format)


@dataclass(frozen=True, slots=True)
class Latents:
    """`count` layers with multi-head latent attention: sizes of the latent and of the rotary key."""

    count: int
    latent: int = 512
    rotary: int = 64

    def layer(self, index: int) -> LayerSpec:
        """Describe the one with this index in the model."""
        return LayerSpec(index, 1, self.latent, self.rotary, None, "q4h", "bf16", latent=True)


@dataclass(frozen=True, slots=True)
class States:
    """`count` recurrent layers of one kind: the last `kernel` inputs of `channels`, and `values` of fp32."""

    count: int
    channels: int
    kernel: int
    values: int = 0

    def state(self, index: int) -> StateSpec:
        """Describe the one with this index in the model."""
        conv = StateTensor("conv", 0, (self.channels, self.kernel), "bf16")
        learned = (StateTensor("recurrent", 0, (self.values,), "fp32"),) if self.values else ()
        return StateSpec(index, (conv, *learned))


@dataclass(frozen=True, slots=True)
class Example:
    """A model of a family by the layers of its config."""

    name: str
    layers: tuple[Layers | Latents | States, ...]

    @property
    def layout(self) -> KVLayout:
        """Its layout."""
        each = list(enumerate(kind for kind in self.layers for _ in range(kind.count)))
        return KVLayout(
            BLOCK_TOKENS,
            tuple(kind.layer(index) for index, kind in each if not isinstance(kind, States)),
            tuple(kind.state(index) for index, kind in each if isinstance(kind, States)),
        )


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one form. `model_types` as their configs name them; `promise`: of the self-test, on a CPU.

    `served`: "text" of models that see as well; "no" with the reason in `about`. `on_card`: what is launched on a card
    in a step of few rows: a graph, or kernel by kernel; "torch": that, with attention to latents by torch.
    """

    name: str
    model_types: tuple[str, ...]
    about: str
    kind: Kind
    served: Served = "yes"
    promise: Literal["bitwise", "close", ""] = "bitwise"
    example: Example | None = None
    on_card: OnCard = "graphs"


FAMILIES = (
    Family(
        "Llama 2 to 3, Mistral, Arcee, SmolLM3",
        ("llama", "mistral", "arcee", "smollm3"),
        "grouped heads",
        "attention",
        example=Example("Llama 3.1 8B", (Layers(32, 8, 128),)),
    ),
    Family("Ministral 3", ("ministral3",), "queries scaled by position, YaRN", "attention"),
    Family(
        "Qwen 3",
        ("qwen3",),
        "norms of Q and K",
        "attention",
        example=Example("Qwen3 8B", (Layers(36, 8, 128),)),
    ),
    Family(
        "Qwen 2 and 2.5, R1's distills of it, Seed-OSS, StarCoder 2",
        ("qwen2", "seed_oss", "starcoder2"),
        "K has a bias and begins with 8 bits",
        "attention",
        example=Example("Qwen2.5 7B", (Layers(28, 4, 128, None, "q8h"),)),
    ),
    Family(
        "Phi 3 and 4",
        ("phi3",),
        "projections in one; RoPE with other factors for long prompts has the long ones for all, or the short ones "
        "within their context (`max_context=4096`)",
        "attention",
        example=Example("Phi 4", (Layers(40, 10, 128),)),
    ),
    Family(
        "Granite 3, OLMo 2, Apertus, ERNIE 4.5, Hunyuan",
        ("granite", "olmo2", "apertus", "ernie4_5", "hunyuan_v1_dense"),
        "multipliers, norms in other places",
        "attention",
        example=Example("Granite 3.3 8B", (Layers(40, 8, 128),)),
    ),
    Family("GLM-4", ("glm", "glm4"), "RoPE on a part of each head; K begins with 8 bits if it has a bias", "attention"),
    Family("Gemma 1", ("gemma",), "heads of 256", "attention"),
    Family(
        "GPT-2, GPT-NeoX, Pythia",
        ("gpt2", "gpt_neox"),
        "a K head for each query; K has a bias and begins with 8 bits",
        "attention",
    ),
    Family(
        "Gemma 2 and 3",
        ("gemma2", "gemma3_text"),
        "windows in half of the layers (2) or five of six (3); Gemma 2 caps its scores",
        "windows",
        example=Example("Gemma 3 27B", (Layers(10, 16, 128), Layers(52, 16, 128, 1024))),
    ),
    Family(
        "Gemma 3 as it is shipped, from 4B on",
        ("gemma3",),
        "windows in five of six layers; they see, here too",
        "windows",
        example=Example("Gemma 3 4B", (Layers(5, 4, 256), Layers(29, 4, 256, 1024))),
    ),
    Family(
        "Gemma 4",
        ("gemma4_text",),
        "windows, larger heads where there is none, KV shared between layers; K and V begin with 8 bits",
        "windows",
        example=Example(
            "Gemma 4 31B", (Layers(10, 4, 512, None, "q8h", "q8h"), Layers(50, 16, 256, 1024, "q8h", "q8h"))
        ),
    ),
    Family(
        "gpt-oss",
        ("gpt_oss",),
        "windows and learned sinks; K and V begin with 8 bits; experts in MXFP4",
        "windows",
        example=Example("gpt-oss-20b", (Layers(12, 8, 64, None, "q8h", "q8h"), Layers(12, 8, 64, 128, "q8h", "q8h"))),
    ),
    Family("OLMo 3, EXAONE 4, Command R7B and A", ("olmo3", "exaone4", "cohere2"), "windows", "windows"),
    Family(
        "Qwen 3 mixtures, Mixtral",
        ("qwen3_moe", "mixtral"),
        "experts",
        "experts",
        example=Example("Qwen3 30B-A3B", (Layers(48, 4, 128),)),
    ),
    Family(
        "GLM-4.5 and 4.6, MiniMax M2",
        ("glm4_moe", "minimax_m2"),
        "experts; RoPE on a part of each head; K begins with 8 bits if it has a bias",
        "experts",
    ),
    Family(
        "GLM-4.7-Flash",
        ("glm4_moe_lite",),
        "multi-head latent attention, whose rotary key stays in 16 bits; experts",
        "latents",
        example=Example("GLM-4.7-Flash", (Latents(47),)),
        on_card="torch",
    ),
    Family(
        "DeepSeek V2, V3 and R1",
        ("deepseek_v2", "deepseek_v3"),
        "multi-head latent attention, experts",
        "latents",
        example=Example("DeepSeek V3", (Latents(61),)),
        on_card="torch",
    ),
    Family(
        "MiniCPM 3, Youtu, A.X K1, LongCat Flash",
        ("minicpm3", "youtu", "axk1", "longcat_flash"),
        "multi-head latent attention; some with experts",
        "latents",
        example=Example("MiniCPM3-4B", (Latents(62, 256, 32),)),
        on_card="torch",
    ),
    Family(
        "Qwen2.5-VL, Qwen3-VL",
        ("qwen2_5_vl", "qwen3_vl"),
        "they also see; here an image is a line of text",
        "vision",
        "text",
    ),
    Family(
        "SmolVLM and SmolVLM2, Idefics 3",
        ("smolvlm", "idefics3"),
        "they see, here too: pictures are kept as text is",
        "vision",
        example=Example("SmolVLM2 2.2B", (Layers(24, 32, 64),)),
    ),
    Family(
        "Mistral Small 3 and 4 and Ministral 3 as they are shipped",
        ("mistral3",),
        "they see, here too",
        "vision",
        example=Example("Mistral Small 3.1 24B", (Layers(40, 8, 128),)),
    ),
    Family(
        "LFM2 and 3 and their mixtures",
        ("lfm2", "lfm2_moe", "lfm3"),
        "short convolutions",
        "convolutions",
        example=Example("LFM2-1.2B", (Layers(6, 8, 64), States(10, 2048, 3))),
        on_card="kernels",
    ),
    Family(
        "Qwen 3.5 and 3.6",
        ("qwen3_5_text", "qwen3_5"),
        "Gated DeltaNet in three of four layers; as they are shipped they also see",
        "delta rule",
        "text",
        "close",
        Example("Qwen3.6-27B", (Layers(16, 4, 256), States(48, 10240, 4, 48 * 128 * 128))),
        on_card="kernels",
    ),
    Family(
        "Qwen 3.5 and 3.6 mixtures",
        ("qwen3_5_moe_text", "qwen3_5_moe"),
        "Gated DeltaNet and experts; as they are shipped they also see",
        "delta rule",
        "text",
        "close",
        Example("Qwen3.6-35B-A3B", (Layers(10, 2, 256), States(30, 8192, 4, 32 * 128 * 128))),
        on_card="kernels",
    ),
    Family(
        "Qwen3-Next", ("qwen3_next",), "Gated DeltaNet and experts", "delta rule", promise="close", on_card="kernels"
    ),
    Family(
        "Kimi Linear, Ling hybrids",
        ("kimi_linear", "bailing_hybrid"),
        "Kimi's delta rule in most layers, multi-head latent attention in the others; experts",
        "delta rule",
        promise="close",
        example=Example("Kimi-Linear-48B", (Latents(7), States(20, 3 * 4096, 4, 32 * 128 * 128))),
        on_card="torch",
    ),
    Family(
        "OLMo Hybrid",
        ("olmo_hybrid",),
        "Gated DeltaNet in three of four layers",
        "delta rule",
        promise="close",
        on_card="kernels",
    ),
    Family(
        "Granite 4-H",
        ("granitemoehybrid",),
        "Mamba 2 in nine of ten layers, experts",
        "mamba",
        promise="close",
        example=Example("Granite-4-H-Small", (Layers(4, 8, 128), States(36, 8448, 4, 128 * 64 * 128))),
        on_card="kernels",
    ),
    Family(
        "Nemotron-H and 3",
        ("nemotron_h",),
        "Mamba 2, layers without attention, experts",
        "mamba",
        promise="close",
        example=Example("Nemotron-3-Nano-30B", (Layers(6, 2, 128), States(23, 6144, 4, 64 * 64 * 128))),
        on_card="kernels",
    ),
    Family(
        "Falcon-H1, Bamba, Zamba 2",
        ("falcon_h1", "bamba", "zamba2"),
        "Mamba 2, alongside attention or between",
        "mamba",
        promise="close",
        on_card="kernels",
    ),
    Family(
        "Jamba",
        ("jamba",),
        "Mamba 1, which `transformers` cannot continue from a state with several tokens",
        "refused",
        "no",
        "",
        on_card="",
    ),
    Family(
        "DeepSeek V3.2, GLM-5",
        ("deepseek_v32", "glm_moe_dsa"),
        "latent attention to tokens that an index chooses",
        "refused",
        "no",
        "",
        on_card="",
    ),
    Family("MiniMax 01", ("minimax",), "lightning attention with a cache of its own", "refused", "no", "", on_card=""),
    Family("Llama 4", ("llama4_text",), "attention within chunks", "refused", "no", "", on_card=""),
    Family("StableLM", ("stablelm",), "keywords that do not reach its attention", "refused", "no", "", on_card=""),
    Family("Falcon", ("falcon",), "attention of its own", "refused", "no", "", on_card=""),
)
