"""The self-test at load: do different paths to the same ids give the same KV, and what can be promised?

One long chunk against odd pieces down to single tokens, alongside another sequence, in the formats to be served.

    bitwise   equal bytes in the arena and equal logits
    close     not equal, but two paths are nearer to each other than the format is to native KV: the mean KL between
              the paths is at most a quarter of the mean KL between the formats, over at least 512 positions
    none      not even that

Where paths are not bitwise equal, those of single steps may still be: a row that decodes is `steady` if its bits depend
neither on drafted rows after it nor on other sequences in its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rekindle.cache.blocks.windows import WindowSlots
from rekindle.kv.arena import KVArena
from rekindle.model.check_text import check_tokens
from rekindle.model.divergence import divergence
from rekindle.model.formats import in_4_bits, native_format
from rekindle.model.loaded import LoadedModel, Promise
from rekindle.model.proof import Proof
from rekindle.model.trial import interleaved_tables, sequence_step
from rekindle.parts import STATE
from rekindle.spec import CODED, KVLayout, LayerSpec

LARGE_MODEL = 1_000_000_000
PIECES = (1, 2, 13, 64, 1, 1, 58, 3, 127, 1, 260)
CLOSE_SHARE = 0.25
STEADY_START = 64
STEADY_ROWS = ((16, 0), (1, 15), (5, 40), (2, 130))  # of a sequence with its drafts, and of another one in its step


def self_test(loaded: LoadedModel) -> Proof:
    """What was found of the same ids on different paths."""
    num_parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    count = min(sum(PIECES) if num_parameters < LARGE_MODEL else 150, loaded.spec.max_context)
    differing, total, same_logits = _compare_bytes(loaded, count, _bounds(count))
    if not differing and same_logits:
        return Proof("bitwise", f"{count} tokens in one chunk and in odd pieces give the same bytes", is_steady=True)
    paths, formats = divergences(loaded)
    promise: Promise = "close" if paths <= CLOSE_SHARE * formats else "none"
    finding = (
        f"{count} tokens in one chunk and in odd pieces: {differing} of {total} bytes differ; "
        f"mean KL between the two {paths:.2g} nats, between rounded and native KV {formats:.2g}"
    )
    if loaded.spec.layout.states:
        return Proof(promise, finding + _finding_of_prompts(loaded, count), is_steady=False)
    is_steady = _is_steady(loaded, count)
    steady = "; a decoding row has the same bits in any company" if is_steady else ""
    return Proof(promise, finding + steady, is_steady=is_steady)


def _finding_of_prompts(loaded: LoadedModel, count: int) -> str:
    """What is true of prompts, which models with recurrent states compute in pieces that end with blocks."""
    size = loaded.spec.layout.block_tokens
    ends = [min(count, turn * (turn + 1) // 2 * size) for turn in range(1, count)]  # pieces of 1, 2, 3, ... blocks
    bounds = [(start, end) for start, end in zip([0, *ends], ends, strict=False) if start < end]
    differing, total, same_logits = _compare_bytes(loaded, count, bounds)
    if not differing and same_logits:
        return "; prompts, in pieces of whole blocks, give the same bytes"
    return f"; in pieces of whole blocks, as prompts are computed, {differing} of {total} differ"


def _is_steady(loaded: LoadedModel, count: int) -> bool:
    """Whether rows have the same bits one at a time, and with drafts and another sequence in their step."""
    layout, rows = loaded.spec.layout, sum(drafted for drafted, _ in STEADY_ROWS)
    start = max(1, min(STEADY_START, count - rows))
    count = min(count, start + rows)
    others = max(other for _, other in STEADY_ROWS)
    ids = check_tokens(loaded.spec.vocab_size, max(count, others))
    tables, num_blocks = interleaved_tables(layout.block_tokens, [count, count, others])
    arena = loaded.compute.arena(layout, num_blocks, loaded.device)
    runner = loaded.compute.runner(loaded, arena)
    for table in tables[:2]:
        runner.forward([sequence_step(ids[:start], 0, table, "none")])
    alone = [runner.forward([sequence_step(ids[at : at + 1], at, tables[0], "all")]) for at in range(start, count)]
    together, at = [], start
    for drafted, other in STEADY_ROWS:
        step = sequence_step(ids[at : min(at + drafted, count)], at, tables[1], "all")
        company = [sequence_step(ids[:other], 0, tables[2], "none")] if other else []
        together += [runner.forward([*company, step])] if at < count else []
        at += drafted
    differing, _ = _differing_bytes(arena, tables[0], tables[1], count)
    return not differing and torch.equal(torch.cat(alone), torch.cat(together))


def _compare_bytes(loaded: LoadedModel, count: int, bounds: Sequence[tuple[int, int]]) -> tuple[int, int, bool]:
    """Count the bytes that differ between one chunk and pieces, and all bytes; compare the last logits."""
    layout = loaded.spec.layout
    ids = check_tokens(loaded.spec.vocab_size, count + 9)
    tables, num_blocks = interleaved_tables(layout.block_tokens, [count, count, 9])
    arena = loaded.compute.arena(layout, num_blocks, loaded.device, _slots_for_states(layout, tables))
    runner = loaded.compute.runner(loaded, arena)
    whole = runner.forward([sequence_step(ids[:count], 0, tables[0], "last")])[0]
    pieced = whole
    for turn, (start, end) in enumerate(bounds):
        others = [sequence_step(ids[count : count + 5 + turn % 4], 0, tables[2], "last")] if turn % 2 else []
        pieced = runner.forward([*others, sequence_step(ids[start:end], start, tables[1], "last")])[-1]
    differing, total = _differing_bytes(arena, tables[0], tables[1], count)
    return differing, total, torch.equal(pieced, whole)


def _slots_for_states(layout: KVLayout, tables: Sequence[Sequence[int]]) -> list[WindowSlots]:
    """Slots for states: of the first table for its last block alone, so that it is computed in one piece."""
    if not layout.states:
        return []
    blocks = [tables[0][-1], *(block for table in tables[1:] for block in table)]
    slots = WindowSlots(STATE, num_slots=len(blocks) + 1, num_blocks=sum(map(len, tables)))
    for block in blocks:
        slots.take(block)
    return [slots]


def _bounds(count: int) -> list[tuple[int, int]]:
    """Start and end of each piece of `count` tokens; the last takes the rest."""
    ends = [min(int(end), count) for end in np.cumsum(PIECES)]
    starts = [0, *ends[:-1]]
    bounds = [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
    return [*bounds[:-1], (bounds[-1][0], count)]


def divergences(loaded: LoadedModel) -> tuple[float, float]:
    """Mean KL in nats over teacher-forced positions: one chunk against pieces, and native KV against 4 bits.

    If the model is served with native KV throughout, it is still compared with the 4-bit format.
    """
    count = min(sum(PIECES), loaded.spec.max_context)
    ids = check_tokens(loaded.spec.vocab_size, count)
    whole = _logits(loaded, ids, [(0, count)])
    pieced = _logits(loaded, ids, _bounds(count))
    other = _logits(_in_other_format(loaded), ids, [(0, count)])
    return divergence(whole, pieced).kl, divergence(other, whole).kl


def _in_other_format(loaded: LoadedModel) -> LoadedModel:
    """The model with native KV; with 4-bit KV if it is served native."""
    native, layout = native_format(loaded.dtype), loaded.spec.layout
    is_native = all({layer.k_format, layer.v_format}.isdisjoint(CODED) for layer in layout.layers)

    def changed(layer: LayerSpec) -> LayerSpec:
        if not is_native:
            return replace(layer, k_format=native, v_format=native)
        k, v = in_4_bits(layer, native)
        return replace(layer, k_format=k, v_format=v)

    layers = tuple(changed(layer) for layer in layout.layers)
    return replace(loaded, spec=replace(loaded.spec, layout=replace(layout, layers=layers)))


def _logits(loaded: LoadedModel, ids: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Logits [len(ids), vocab] of a sequence computed in these pieces."""
    layout = loaded.spec.layout
    (table,), num_blocks = interleaved_tables(layout.block_tokens, [len(ids)])
    runner = loaded.compute.runner(loaded, loaded.compute.arena(layout, num_blocks, loaded.device))
    return torch.cat([runner.forward([sequence_step(ids[a:b], a, table, "all")]) for a, b in bounds])


def _differing_bytes(arena: KVArena, first: Sequence[int], second: Sequence[int], count: int) -> tuple[int, int]:
    """How many bytes of the first `count` tokens differ between two block lists, and how many there are."""
    differing = total = 0
    size = arena.layout.block_tokens
    for part in arena.layout.parts:
        one, other = np.empty((2, part.payload_bytes), dtype=np.uint8)
        for index, (a, b) in enumerate(zip(first, second, strict=True)):
            if not (arena.has(part.index, a) and arena.has(part.index, b)):
                continue
            num_tokens = min(size, count - index * size)
            arena.read(a, part.index, num_tokens, one)
            arena.read(b, part.index, num_tokens, other)
            differing += int((one != other).sum())
            total += part.payload_bytes
    return differing, total
