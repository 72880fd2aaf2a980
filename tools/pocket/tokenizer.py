"""A byte-level BPE tokenizer with ChatML control tokens, trained on conversations and the standard library's prose."""

from __future__ import annotations

import itertools
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rekindle_pocket import MODEL_DIR, conversations

TEMPLATE_PATH = MODEL_DIR / "chat_template.jinja"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_CHATS = 3000


def load_template() -> jinja2.Template:
    """Load the chat template as a plain jinja2 template."""
    env = jinja2.Environment()
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return env.from_string(TEMPLATE_PATH.read_text())


def render(template: jinja2.Template, chat: dict[str, Any]) -> str:
    """Render a whole conversation as the model sees it."""
    return template.render(messages=chat["messages"], tools=chat.get("tools"), add_generation_prompt=False)


def corpus(num_files: int) -> Iterator[str]:
    """Yield conversations, then the standard library's sources: English prose and code that every machine has."""
    template, rng = load_template(), random.Random(0)
    chats = (render(template, conversations.conversation(rng, 300)) for _ in range(NUM_CHATS))
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    paths = [path for path in sources if "site-packages" not in path.parts]
    top = [path for path in paths if path.parent.name.startswith("python")]
    chosen = (top + [path for path in paths if path not in set(top)])[:num_files]
    return itertools.chain(chats, (path.read_text(errors="ignore") for path in chosen))


def train_tokenizer(*, vocab_size: int, context: int, num_files: int = 120) -> PreTrainedTokenizerFast:
    """Train a tokenizer of exactly `vocab_size` tokens, padded with unused ones if the corpus yields fewer."""
    tokenizer = Tokenizer(models.BPE())
    splitters = [
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(num_files), trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|unused_{index}|>" for index in range(missing)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    fast.chat_template = TEMPLATE_PATH.read_text()
    return fast
