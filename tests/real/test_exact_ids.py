"""Greedy replies in fp32 have the ids that transformers gives, prompts of its own template and tokenizer included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rekindle import Engine

PROMPTS = (
    "What is the capital of Italy?",
    "Write a short poem about a lighthouse in winter.",
    "def fibonacci(n):\n    # complete this function, please\n",
    "Translate to French: the library is closed on Monday.",
    "Explain in one sentence why the sky is blue; then name 3 colours of a rainbow: é, ü, 数字 🙂.",
)
NUM_TOKENS = 20


def of_transformers(file: Path) -> list[tuple[list[int], list[int]]]:
    """Prompt and reply by transformers alone, of each prompt; without a chat template prompts are texts."""
    given: Any = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**given)
    model: Any = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    found = []
    for text in PROMPTS:
        if tokenizer.chat_template:
            said = [{"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer(text)["input_ids"]
        with torch.inference_mode():
            whole = model.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False)[0].tolist()
        found.append((list(ids), whole[len(ids) :]))
    return found


def test_twenty_greedy_tokens_are_those_of_transformers(real_file: Path) -> None:
    expected = of_transformers(real_file)
    with Engine.from_pretrained(str(real_file), dtype="fp32", kv="fp32", store="off", threads=1) as engine:
        options: Any = {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": NUM_TOKENS}
        for text, (prompt, reply) in zip(PROMPTS, expected, strict=True):
            if engine.encoder.template.sources:
                result = engine.chat("ada", [{"role": "user", "content": text}], **options)
            else:
                result = engine.generate(text, agent="ada", **options)
            assert list(result.prompt_ids) == prompt
            ended = result.finish_reason == "stop"  # by a token that is not part of the reply
            assert list(result.token_ids) == (reply[:-1] if ended else reply)
            assert not ended or reply[-1] in engine.spec.eos_ids
        if not engine.encoder.template.sources:
            bos = engine.encoder.encode(engine.encoder.render_text("")).tolist()
            assert len(bos) == 1 and all(prompt[0] == bos[0] and bos[0] not in prompt[1:] for prompt, _ in expected)
