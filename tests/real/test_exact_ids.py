"""Greedy replies in fp32 have the ids that transformers gives, prompts of its own template and tokenizer included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rekindle import Engine
from rekindle.compute.load import read_config
from rekindle.config import ModelSettings
from rekindle.engine.calls import text_request
from rekindle.model import checkpoint
from rekindle.model.adapter import register_attention
from rekindle.model.loader import load_weights
from tests.real.conftest import NAMES

PROMPTS = (
    "What is the capital of Italy?",
    "def fibonacci(n):\n    # complete this function, please\n",
    "Explain in one sentence why the sky is blue; then name 3 colours of a rainbow: é, ü, 数字 🙂.",
)
NUM_TOKENS = 20


def weights_of(file: Path) -> Any:
    """The model of transformers in fp32: with both models of `make real` its own reading of the file, too.

    That takes a quarter of a minute; `test_gguf_weights` compares ours with it there.
    """
    if len(NAMES) > 1:
        return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    register_attention()
    directory = checkpoint.Source.find(str(file), None).fetch()
    model: Any = load_weights(directory, read_config(directory), ModelSettings(device="cpu", dtype="fp32")).model
    model.set_attn_implementation("eager")
    return model


def test_twenty_greedy_tokens_are_those_of_transformers(real_file: Path) -> None:
    """After the prompt and its reply, the likeliest token of transformers at each place is the reply's next one."""
    tokenizer: Any = AutoTokenizer.from_pretrained(real_file.parent, gguf_file=real_file.name)
    model = weights_of(real_file)
    settings: Any = {"dtype": "fp32", "kv": "fp32", "kernels": "torch", "store": "off", "threads": 1}
    with Engine.from_pretrained(str(real_file), max_context=256, **settings) as engine:
        options: Any = {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": NUM_TOKENS}
        if engine.encoder.template.sources:
            talks: Any = [[{"role": "user", "content": text}] for text in PROMPTS]
            prompts = [tokenizer.apply_chat_template(each, add_generation_prompt=True)["input_ids"] for each in talks]
            replies = [engine.stream(None, each, **options) for each in talks]
        else:
            prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
            (bos,) = engine.encoder.encode(engine.encoder.render_text("")).tolist()
            assert all(each[0] == bos and bos not in each[1:] for each in prompts)
            asked = [text_request(text, None, "default", defaults=engine.sampling, **options) for text in PROMPTS]
            replies = [engine.submit(each) for each in asked]
        for prompt, reply in zip(prompts, replies, strict=True):
            result = reply.result()
            assert list(result.prompt_ids) == prompt
            ids = list(result.token_ids)
            with torch.inference_mode():
                likeliest = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
            if result.finish_reason == "stop":  # by a token that is not part of the reply
                assert likeliest[-1] in engine.spec.eos_ids
            else:
                assert len(ids) == NUM_TOKENS
            assert ids == likeliest[:-1]
