"""Train the pocket model: an 8-million-parameter Qwen3 that answers from its conversation.

    python tools/pocket/train.py --out pocket-model --minutes 7       # about 10 minutes on one H200
    python tools/pocket/train.py --out try --steps 20 --tokens 1 --batch 8192      # a smoke run on a CPU
    python tools/pocket/train.py --init pocket-model --out better --stages 1:256 --batch 4096 --lr 6e-4 --minutes 60

Writes a Hugging Face model directory (config, model.safetensors in bfloat16, tokenizer, chat template) and prints
recall by distance. Same seed, same conversations; weights differ in the last bits by device.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizer import load_template, render, train_tokenizer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rekindle_pocket import conversations

CONTEXT = 4096
LENGTHS = (40, 100, 200, 400, 900, 1800, 2600)  # words of a conversation
TOKENS_PER_WORD = 1.5
WARM_UP_STEPS = 150
REPLY_TOKENS = 28


class RowMaker:
    """Builds training rows in a worker process: conversations packed end to end, replies masked in."""

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._template = load_template()
        self._start = self._tokenizer.token_to_id("<|im_start|>")
        self._end = self._tokenizer.token_to_id("<|im_end|>")
        self._reply = self._tokenizer.encode("assistant").ids[0]

    def row(self, seed: int, context: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids [context + 1] and a mask of those to learn."""
        rng = random.Random(seed)
        lengths = [words for words in LENGTHS if words * TOKENS_PER_WORD <= context][-4:]
        ids: list[int] = []
        while len(ids) < context + 1:
            chat = conversations.conversation(rng, rng.choice(lengths))
            ids += [*self._tokenizer.encode(render(self._template, chat)).ids, 0]
        ids = ids[: context + 1]
        return np.array(ids, np.uint16), self._replies(ids)

    def _replies(self, ids: list[int]) -> np.ndarray:
        learn, speaking = np.zeros(len(ids), bool), False
        for index, token in enumerate(ids):
            if token == self._start:
                speaking = index + 1 < len(ids) and ids[index + 1] == self._reply
            elif speaking and ids[index - 1] != self._start:
                learn[index] = True
            if token == self._end:
                speaking = False
        return learn


_maker: list[RowMaker] = []


def _init(tokenizer_json: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _maker[:] = [RowMaker(tokenizer_json)]


def _row(job: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    return _maker[0].row(*job)


@dataclass(frozen=True)
class Stage:
    """Rows of one context length, used until `until` (a share of the schedule)."""

    until: float
    ids: torch.Tensor  # [rows, context + 1] int32
    learn: torch.Tensor  # [rows, context + 1] bool


def build_stages(tokenizer: PreTrainedTokenizerFast, schedule: str, tokens: float) -> list[Stage]:
    """Build the stages of a schedule such as "0.35:384,1:4096" (until this share: context).

    Short conversations come first: recall forms quickly among few facts, then extends to the full context.
    """
    stages = []
    with mp.Pool(os.cpu_count(), _init, (tokenizer.backend_tokenizer.to_str(),)) as pool:
        for part in schedule.split(","):
            until, context = (kind(text) for kind, text in zip((float, int), part.split(":"), strict=True))
            jobs = [(context * 1_000_000 + index, context) for index in range(max(8, int(tokens / context)))]
            made = pool.map(_row, jobs, chunksize=32)
            ids, learn = np.stack([row[0] for row in made]), np.stack([row[1] for row in made])
            stages.append(Stage(until, torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(learn)))
    return stages


@torch.inference_mode()
def recall(
    model: Any, tokenizer: Any, *, distances: tuple[int, ...] = (50, 200, 600, 1200, 2000), cases: int = 40
) -> dict[str, float]:
    """Return the share of held-out facts repeated exactly by greedy decoding, by words between fact and question."""
    scores, eos = {}, tokenizer.convert_tokens_to_ids("<|im_end|>")
    for distance in distances:
        rng, right, longest = random.Random(10_000 + distance), 0, 0
        for _ in range(cases):
            case = conversations.recall_case(rng, distance)
            text = tokenizer.apply_chat_template(case["messages"], tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids.to(model.device)
            longest = max(longest, ids.shape[1])
            if ids.shape[1] > CONTEXT - REPLY_TOKENS:
                continue
            out = model.generate(ids, max_new_tokens=REPLY_TOKENS, do_sample=False, eos_token_id=eos, pad_token_id=0)
            reply = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
            right += reply == case["answer"]
        scores[f"{distance} words (<= {longest} tokens)"] = right / cases
    return scores


def new_model(*, hidden: int, layers: int, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a fresh model with KV heads of 64."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_theta=50_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def train(model: Any, stages: list[Stage], given: argparse.Namespace) -> None:
    """Train with AdamW, warm-up and a cosine down to a twentieth; the loss counts replies only."""
    device = model.device.type
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=given.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    body = torch.compile(model.model, dynamic=False) if device == "cuda" else model.model
    order, started, smooth = torch.Generator().manual_seed(0), time.monotonic(), None
    for step in range(given.steps):
        done = max(step / given.steps, (time.monotonic() - started) / 60 / given.minutes)
        if done >= 1:
            break
        for group in optimiser.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * done))
            group["lr"] = given.lr * min(1, (step + 1) / WARM_UP_STEPS) * (0.05 + 0.95 * cosine)
        stage = next(stage for stage in stages if done < stage.until)
        num_rows = max(1, given.batch // stage.ids.shape[1])
        pick = torch.randint(0, stage.ids.shape[0], (num_rows,), generator=order)
        ids, mask = stage.ids[pick].to(device).long(), stage.learn[pick].to(device)[:, 1:]
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model.lm_head(body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[mask])
        loss = torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][mask])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        if step % 50 == 0:
            print(f"step {step} reply loss {smooth:.4f} {time.monotonic() - started:.0f} s", flush=True)


def parse() -> argparse.Namespace:
    """Parse the recipe's numbers from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--init", help="continue from this model directory instead of a fresh model")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=1e9, help="end the schedule early after this long")
    parser.add_argument("--stages", default="0.35:384,0.6:1024,1:4096", help="until this share: context length")
    parser.add_argument("--tokens", type=float, default=30, help="millions of tokens generated for each context length")
    parser.add_argument("--batch", type=int, default=196_608, help="tokens per step")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    """Create or load the model, train it, save it, print its recall."""
    given = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    if given.init:
        tokenizer = AutoTokenizer.from_pretrained(given.init)
        model = AutoModelForCausalLM.from_pretrained(given.init, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(vocab_size=given.vocab, context=CONTEXT)
        model = new_model(hidden=given.hidden, layers=given.layers, tokenizer=tokenizer)
    model.to(device)
    stages = build_stages(tokenizer, given.stages, given.tokens * 1e6)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters on {device}", flush=True)
    train(model, stages, given)
    model.eval().to(torch.bfloat16).save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    print(json.dumps(recall(model, tokenizer)), flush=True)


if __name__ == "__main__":
    main()
