"""How a GGUF file's text is split before its merges apply, by the name that `tokenizer.ggml.pre` gives.

Owns this table: the patterns of each name, as llama.cpp has them (src/llama-vocab.cpp). Where it only comes near the
original tokenizer, they are the original's: combining marks belong to words in those of gpt-4o and tekken, and blanks
outside ASCII to no word in deepseek-coder. Names whose way of splitting is no pattern, or none that was compared, are
not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.text import splitters
from rekindle.text.splitters import CL100K, DIGIT, GPT2, O200K, QWEN2, QWEN35, TEKKEN

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_HAN_AND_HANGUL = "[一-龥ࠀ-一가-퟿]+"
_NO_SENTENCE_END = " ?[^(\\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class Splits:
    """Patterns that cut a text one after the other; what none matches is a piece, too.

    `whole_words`: a piece that is in the vocabulary is one token, whatever the merges say. `adds_bos`: a prompt begins
    with the token for that, where the file says nothing.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False

    def json(self) -> dict[str, Any]:
        """The pre-tokenizer as tokenizer.json has it."""
        if self.patterns == (GPT2,):
            return _byte_level(splits=True)
        if self.patterns == (DIGIT, GPT2):
            return _sequence({"type": "Digits", "individual_digits": True}, _byte_level(splits=True))
        parts = [
            {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
            for each in self.patterns
        ]
        return _sequence(*parts, _byte_level(splits=False))


def _sequence(*parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _byte_level(*, splits: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits}


_GPT2, _DIGITS_FIRST, _QWEN2 = Splits((GPT2,)), Splits((DIGIT, GPT2)), Splits((QWEN2,))
_LLAMA3 = Splits((CL100K,), whole_words=True, adds_bos=True)
_CL100K, _O200K = Splits((CL100K,)), Splits((O200K,))
_DEEPSEEK3 = Splits(splitters.DEEPSEEK3)
_BLOOM = Splits((_NO_SENTENCE_END,))
DEFAULT = Splits((splitters.PUNCTUATION, GPT2, splitters.NUMBER, splitters.THREE_DIGITS))

SPLITS: Mapping[str, Splits] = {
    "default": DEFAULT,
    **dict.fromkeys(
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
        "modern-bert mpt olmo jais trillion granite-docling exaone4".split(),
        _GPT2,
    ),
    **dict.fromkeys("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2".split(), _DIGITS_FIRST),
    **dict.fromkeys("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano".split(), _LLAMA3),
    **dict.fromkeys("dbrx smaug-bpe chatglm-bpe".split(), _CL100K),
    **dict.fromkeys("glm4 glm5".split(), Splits((CL100K,), whole_words=True)),
    **dict.fromkeys(
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 "
        "bailingmoe bailingmoe2 llada-moe".split(),
        _QWEN2,
    ),
    "qwen35": Splits((QWEN35,)),
    **dict.fromkeys("gpt-4o llama4 kanana2 talkie minimax-m2".split(), _O200K),
    "tekken": Splits((TEKKEN,), whole_words=True, adds_bos=True),
    **dict.fromkeys("deepseek-v3 hunyuan-dense joyai-llm hy_v4".split(), _DEEPSEEK3),
    "deepseek-coder": Splits((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, DIGIT)),
    "falcon": Splits((splitters.PUNCTUATION_FALCON, GPT2, splitters.THREE_DIGITS)),
    **dict.fromkeys("poro-chat bloom gpt3-finnish".split(), _BLOOM),
    "viking": Splits((_NO_SENTENCE_END, DIGIT)),
    "seed-coder": Splits(
        (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)
    ),
    "minicpm5": Splits(
        (
            r"\p{N}{1,3}",
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}",
        ),
        whole_words=True,
    ),
}
