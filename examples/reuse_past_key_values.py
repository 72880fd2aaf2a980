"""Store `past_key_values` of plain transformers in a CacheManager: the second turn computes only what is new.

python examples/reuse_past_key_values.py [MODEL]     (the bundled one by default; needs torch and transformers)
"""

import sys
from copy import deepcopy

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from rekindle.cache import CacheManager
from rekindle_pocket import MODEL_DIR

name = sys.argv[1] if len(sys.argv) > 1 else MODEL_DIR
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()


def kv_bytes(past: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers)


cache: CacheManager[DynamicCache] = CacheManager(max_memory_mb=512, size_of=kv_bytes)


@torch.inference_mode()
def reply(messages: list[dict[str, str]], num_tokens: int = 16) -> tuple[str, int, int]:
    """Answer greedily; also return the number of prompt tokens, and how many of them were computed."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    match = cache.lookup(ids[:-1])  # the last token always runs: its logits are needed
    past, known = (deepcopy(match.payload), match.matched) if match else (DynamicCache(config=model.config), 0)
    if past.get_seq_length() > known:  # the entry continues past what this prompt shares
        past.crop(known - past.get_seq_length())
    answer: list[int] = []
    new = ids[known:]
    while len(answer) < num_tokens and tokenizer.eos_token_id not in answer:
        logits = model(torch.tensor([new]), past_key_values=past, use_cache=True).logits
        new = [int(logits[0, -1].argmax())]
        answer += new
    cache.store(ids + answer[:-1], past)  # the last token of the answer was not run
    return tokenizer.decode(answer, skip_special_tokens=True), len(ids), len(ids) - known


talk = [{"role": "system", "content": "You are Nadia, the archivist. You keep the letters of the harbour office."}]
other = [*talk, {"role": "user", "content": "Where is the harbour?"}]
for question in ("Who are you?", "And what do you keep?"):
    talk.append({"role": "user", "content": question})
    answer, num_prompt, computed = reply(talk)
    print(f"{question} {computed} of {num_prompt} prompt tokens computed: {answer}")
    talk.append({"role": "assistant", "content": answer})
other_answer, num_prompt, computed = reply(other)  # shares only the beginning of the entry
print(f"{other[-1]['content']} {computed} of {num_prompt} prompt tokens computed: {other_answer}")
for messages, expected in ((talk[:-1], answer), (other, other_answer)):
    cache.clear()
    print("the same without the cache:", reply(messages)[0] == expected)
