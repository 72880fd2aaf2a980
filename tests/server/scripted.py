"""A real model that says what a script says: a tiny Llama whose next token follows from the last one alone.

Attention and MLP add nothing to the stream, so the logits of a token are those of its embedding, and the rows of the
head are set to what comes after it. Everything else is as ever: KV is computed, stored and reused. The first word of
the last user or tool message picks the script: the template ends prompts in a control token of that name. A prompt may
also end in the beginning of a call (`FORCED`). "muse" and "ponder" think before they speak; told not to, "muse" talks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM

from rekindle import Engine
from tests.given import settings_of
from tests.proofs import proved
from tests.server import conftest
from tests.server.conftest import Served
from tests.tiny_models import END_ID, tiny_config, tiny_tokenizer, write_tokenizer

# Every piece is one token; all of them differ, for a token has one successor (a script that forks has several).
LOOK = '{"place": "attic </tool_call>", "n": [1, {}], "é": "\\u00e9\\n"}'
SCRIPTS: dict[str, list[str]] = {
    "look": [
        "Let me", " look.", '<tool_call>\n{"name": "lo', 'ok", "argum', 'ents": {"pla', 'ce": "attic </tool_call>", ',
        '"n": [1, {}], "é"', ': "\\u00e9\\n"}}\n</tool_', "call>",
    ],
    "twice": [
        '<tool_call>\n{"name": "add", "ar', 'guments": {"a": 1,', '"b":2}}\n</tool_call', '>\n<tool_call>{"argum',
        'ents": {"c":\n3}, ', '"name": "sub"', "}\n</tool_call>\n",
    ],
    "hurt": ['<tool_call>\n{"name": "hurt"', ', "arguments": oops', "}</tool_call> sorry"],
    "cut": ['<tool_call>{"name": "cut", "argument', 's": {"long": "', "and longer ", "and so on ", "until"],
    "paths": ['<tool_call>\n{"name": "enter"', ', "arguments": {"path": "C:\\U', "sers\nold\\", 'xy"}}\n</tool_call>'],
    "tear": ['<tool_call>\n{"name": "rm"', ', "arguments": {"path": "a", ', "'dry': true}", "}\n</tool_call>."],
    "talk": ["It is", " in the", " attic", " of the", " house."],
    "smile": [" Sm", "ile 🙂 caf", "é"],
    "muse": ["<think>\nLamps", " weigh little", ".\n</think>\n\n", "A feather", " weighs less."],
    "ponder": [
        "<think>\nSums", " need add.\n</think>", '\n\n<tool_call>\n{"name": "add"',
        ', "arguments": {"a": 4}}\n</tool_call>',
    ],
}  # fmt: skip
# What follows where a call was begun for the model: behind its name, or before it.
FORCED = {
    '<tool_call>\n{"name": "look", "arguments":': [' {"place": "cellar"}', "}\n</tool_call> there"],
    '<tool_call>\n{"name": "': ['look", "arguments": {"place": ', '"loft"}}\n</tool_call>'],
}
FORKS = {"toss": [" heads", " tails"]}
CHAINS = (*SCRIPTS.values(), *FORCED.values())
CUES = tuple(f"<|{name}|>" for name in (*SCRIPTS, *FORKS))
TEMPLATE = """
{%- set ns = namespace(word='') %}
{%- for message in messages %}
{%- if message.role in ('user', 'tool') %}{% set ns.word = message.content.split(' ')[0] %}{% endif %}
{%- if ns.word == 'muse' and enable_thinking is false %}{% set ns.word = 'talk' %}{% endif %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|><|' + ns.word + '|>' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- if loop.first and tools %}{{- (tools | tojson) + '\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|><|' + ns.word + '|>' }}{% endif %}
"""
HIDDEN = 256
LOUD = 4.0  # 64 above what is not in the script: temperature 1 says the same as 0


def _spelled(piece: str) -> str:
    """A piece as byte-level vocabularies write it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    signs = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return "".join(signs[byte] for byte in piece.encode())


def write_scripted_model(directory: Path) -> Path:
    """Write model, tokenizer and template."""
    directory.mkdir(parents=True)
    write_tokenizer(directory, TEMPLATE)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_str(tiny_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken(cue, special=True, normalized=False) for cue in CUES])
    described = json.loads(tokenizer.to_str())
    first = tokenizer.get_vocab_size()
    pieces = [piece for pieces in (*SCRIPTS.values(), *FORKS.values(), *FORCED.values()) for piece in pieces]
    assert len(set(pieces)) == len(pieces), "a piece stands twice"
    ids = {piece: first + at for at, piece in enumerate(pieces)}
    described["model"]["vocab"] |= {_spelled(piece): ids[piece] for piece in pieces}
    path.write_text(json.dumps(described), "utf-8")
    cues = {cue: tokenizer.token_to_id(cue) for cue in CUES}
    with torch.random.fork_rng():
        torch.manual_seed(0)  # what follows where a constraint leaves the script is the same in every run
        model = AutoModelForCausalLM.from_config(
            tiny_config("llama", vocab_size=first + len(pieces), hidden_size=HIDDEN, head_dim=64,
                        max_position_embeddings=2048),
            dtype=torch.float32,
        )  # fmt: skip
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        follow = [
            *((cues[f"<|{name}|>"], ids[said[0]]) for name, said in SCRIPTS.items()),
            *((cues[f"<|{name}|>"], ids[said]) for name, ways in FORKS.items() for said in ways),
            *((tokenizer.encode(begun).ids[-1], ids[said[0]]) for begun, said in FORCED.items()),
            *((ids[a], ids[b]) for said in CHAINS for a, b in itertools.pairwise(said)),
            *((ids[said[-1]], END_ID) for said in CHAINS),
            *((ids[said], END_ID) for ways in FORKS.values() for said in ways),
        ]
        embeddings = model.model.embed_tokens.weight
        for token, after in follow:
            model.lm_head.weight[after] += LOUD * embeddings[token] / embeddings[token].norm()
    model.save_pretrained(directory)
    return directory


@contextmanager
def serving(**flags: object) -> Iterator[Served]:
    """A server over a real socket with an engine of these settings."""
    settings = settings_of(**flags)
    with proved(Engine(settings)) as engine:
        with conftest.serving(engine, settings.server) as running:
            yield running
        engine.check()
