"""A real model that generates what a script allows, with its KV deciding among the alternatives.

A small Llama whose weights are set instead of trained. The last token decides which pieces may come next; the output
of attention over the whole context picks one of them, so a reply is well formed and yet changes if one block of KV is
wrong. Some heads of the first layer look back by position alone: one to the previous token, others to the end of the
prompt's last tool result, for states whose followers depend on it. Every piece is one token, an added token of the
tokenizer, so a reply sent back as history becomes exactly the ids that were generated.

    a row of the stream   state of the token + the token itself + the states looked back to + output of attention
    a row of the head     the states it may follow + its own direction, which picks one of several
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.coding_day.balance import balance
from benchmarks.coding_day.model_script import Script, State

HIDDEN, HEAD, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS = 512, 64, 8, 2, 2
MOST_LOOKING = NUM_HEADS // NUM_KV_HEADS  # heads that look back; they share one KV head
MAX_CONTEXT = 32768
ROPE_THETA = (
    200.0  # everything rotates within a few hundred tokens, so that the output of attention changes from turn to turn
)
BPE_TOKENS = 1024
WORD_WEIGHT = 500  # how often the tokenizer's corpus repeats a word that must become one token
CONSTANT = 4.0  # the first coordinate of every embedding, for the heads that look back
LOUD = 6.0  # a piece that may come next scores about 55 above the others
AFTER_TOKEN = 75.0  # one that may follow the previous token, about 45 above those that may not
AFTER_RESULT = 50.0  # one that may follow the last tool result, about 30
CHOICE = 5.0  # how far attention separates pieces that are all allowed
PEAK = 12.0  # of the keys of the heads that look back: about 20 between the right token and any other
PEAK_PAIRS = 12  # of its 32 pairs of coordinates: those that rotate fast
SHARP = 1.8  # of the other heads: scores have a standard deviation of about SHARP squared
LOOKED_BACK, BROUGHT = 0.5, 0.5  # shares of an embedding's size added by each looking head and by all others


def write_scripted_model(
    directory: Path, script: Script, *, template: str, corpus: Sequence[str], seed: int = 0
) -> Path:
    """Write model, tokenizer and template; the tokenizer learns its other tokens from `corpus`. Takes seconds."""
    directory.mkdir(parents=True)
    tokenizer = _tokenizer(script, corpus)
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "TokenizersBackend",
        "eos_token": script.ends[0],
        "bos_token": None,
        "model_max_length": MAX_CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described), "utf-8")
    (directory / "chat_template.jinja").write_text(template, "utf-8")
    config = AutoConfig.for_model(
        "llama",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=MAX_CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=[tokenizer.token_to_id(end) for end in script.ends],
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _set_attention(model.model.layers, _offsets(script, tokenizer))
        ids, states = _set_tokens(model, script, tokenizer)
        texts = [tokenizer.encode(text).ids for text in corpus]
        balance(model, script, ids, states=states, texts=texts)
    # As models are published: in fp32 torch attends, three times as slowly as the kernels.
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def _tokenizer(script: Script, corpus: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE; the pieces are added tokens, so their text is always that one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=BPE_TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*corpus, *script.words * WORD_WEIGHT], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in script.special])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in script.marks])
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in script.pieces()])
    return tokenizer


def _offset(state: State, script: Script, tokenizer: Tokenizer) -> int:
    """Return how many tokens back a state's token looks."""
    return 1 if state.place is None else state.place + 1 + len(tokenizer.encode(script.tail).ids)


def _offsets(script: Script, tokenizer: Tokenizer) -> list[int]:
    """Return all offsets, that of the previous token first."""
    found = {_offset(state, script, tokenizer) for state in script.states.values() if state.after}
    offsets = [1, *sorted(found - {1})]
    assert len(offsets) <= MOST_LOOKING, offsets
    return offsets


def _set_attention(layers: Any, offsets: Sequence[int]) -> None:
    for index, layer in enumerate(layers):
        attention = layer.self_attn
        layer.mlp.down_proj.weight.zero_()
        for projection in (attention.q_proj, attention.k_proj):
            torch.nn.init.normal_(projection.weight, std=SHARP / HIDDEN**0.5)
        torch.nn.init.normal_(attention.v_proj.weight, std=HIDDEN**-0.5)
        torch.nn.init.normal_(attention.o_proj.weight, std=BROUGHT / (HEAD * NUM_HEADS) ** 0.5)
        if index == 0:
            _look_back(attention, offsets)


def _look_back(attention: Any, offsets: Sequence[int]) -> None:
    """Make the first heads attend `offsets` tokens back, by position alone, and copy what is there."""
    turns = ROPE_THETA ** (-torch.arange(PEAK_PAIRS) * 2 / HEAD)
    group = MOST_LOOKING * HEAD
    q, k, v, o = (getattr(attention, f"{name}_proj").weight for name in "qkvo")
    q[:group] = 0
    k[:HEAD] = 0
    k[:PEAK_PAIRS, 0] = PEAK / CONSTANT
    v[:HEAD, 0] = 0
    o[:, :group] = 0
    for head, offset in enumerate(offsets):
        start = head * HEAD
        q[start : start + PEAK_PAIRS, 0] = PEAK / CONSTANT * (offset * turns).cos()
        q[start + HEAD // 2 : start + HEAD // 2 + PEAK_PAIRS, 0] = -PEAK / CONSTANT * (offset * turns).sin()
        torch.nn.init.normal_(o[:, start : start + HEAD], std=LOOKED_BACK / HEAD**0.5)


def _set_tokens(
    model: Any, script: Script, tokenizer: Tokenizer
) -> tuple[dict[str, list[int]], dict[str, torch.Tensor]]:
    """Set embeddings, which encode each token's state, and rows of the head; return each state's ids and direction."""
    names = list(script.states)
    states = dict(zip(names, torch.nn.functional.normalize(_directions(len(names)), dim=1), strict=True))
    ids = {name: [_id(tokenizer, piece) for piece in state.pieces] for name, state in script.states.items()}
    ids["cue"] = sorted({*ids.get("cue", ()), *(tokenizer.encode(cue).ids[-1] for cue in script.cues)})
    own = _directions(tokenizer.get_vocab_size())
    for name, tokens in ids.items():
        for token in tokens:
            own[token] = own[token] / own[token].norm() + states[name]
    size = (HIDDEN - CONSTANT**2) ** 0.5
    embeddings = own / own.norm(dim=1, keepdim=True) * size
    embeddings[:, 0] = CONSTANT
    model.model.embed_tokens.weight.copy_(embeddings)
    first = model.model.layers[0].self_attn
    backs = {
        offset: first.o_proj.weight[:, head * HEAD : (head + 1) * HEAD] @ first.v_proj.weight[:HEAD]
        for head, offset in enumerate(_offsets(script, tokenizer))
    }
    rows = model.lm_head.weight.zero_()
    for name, state in script.states.items():
        for following in state.followers():
            rows[ids[following]] += LOUD * states[name]
        if not state.after:
            continue
        # What each earlier token contributes, and for each a direction that responds to it alone.
        earlier = torch.stack([embeddings[ids[before]].mean(0) for before in state.after])
        heard = torch.linalg.pinv(earlier @ backs[_offset(state, script, tokenizer)].T)
        for direction, afters in zip(heard.T, state.after.values(), strict=True):
            for following in afters:
                rows[ids[following]] += (AFTER_TOKEN if state.place is None else AFTER_RESULT) * direction
    _add_choices(rows, script, ids, embeddings, backs[1])
    return ids, states


def _add_choices(
    rows: torch.Tensor, script: Script, ids: Mapping[str, Sequence[int]], embeddings: torch.Tensor, back: torch.Tensor
) -> None:
    """Give each piece its own direction, orthogonal to the two tokens before it, so that attention alone decides."""
    for name, tokens in ids.items():
        before = _before(script, name)
        previous = [token for other in before for token in ids[other]]
        earlier = [token for other in before for first in _before(script, other) for token in ids[first]]
        if previous:
            known = torch.cat([embeddings[previous], embeddings[earlier] @ back.T])
            known[:, 0] = 0
            basis, sizes, _ = torch.linalg.svd(known.T, full_matrices=False)
            kept = basis[:, sizes > 1e-3 * sizes.max()]
            choice = torch.nn.functional.normalize(_directions(len(tokens)), dim=1)
            rows[tokens] += CHOICE * (choice - choice @ kept @ kept.T)


def _before(script: Script, name: str) -> list[str]:
    """Return the states that this one may follow."""
    return [other for other, state in script.states.items() if name in state.followers()]


def _directions(count: int) -> torch.Tensor:
    """Return random rows [count, HIDDEN] with 0 in the constant coordinate."""
    found = torch.randn(count, HIDDEN)
    found[:, 0] = 0
    return found


def _id(tokenizer: Tokenizer, piece: str) -> int:
    found = tokenizer.token_to_id(piece)
    assert found is not None, f"{piece!r} is no token"
    return int(found)
