"""Makes all allowed continuations of a scripted model about equally likely.

The output of attention has a part that hardly changes from prompt to prompt. It is measured on a generated
conversation, in which the script is followed at random, and removed from each piece's row; the rest differs from
prompt to prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.coding_day.model_script import Script

MOST_TOKENS = 4000  # of the conversation
MOST_TEXT_TOKENS = 200  # of the text between two replies
Fork = tuple[str, tuple[str, ...]]  # a state and those that may come next


def balance(
    model: Any,
    script: Script,
    ids: Mapping[str, Sequence[int]],
    *,
    states: Mapping[str, torch.Tensor],
    texts: Sequence[Sequence[int]],
) -> None:
    """Adjust the rows of `model`'s head for each state's followers, along its direction; `texts` surround replies.

    `ids` are the tokens of each state, `states` their directions in the stream [hidden].
    """
    tokens, forks = _conversation(script, ids, texts)
    streams = model.model(torch.tensor([tokens])).last_hidden_state[0]  # [tokens, hidden]
    rows = model.lm_head.weight
    for (state, fork), positions in forks.items():
        pieces = [token for name in fork for token in ids[name]]
        leans = torch.tensor([script.states[name].lean for name in fork for _ in ids[name]])
        if len(pieces) > 1:
            means = (streams[positions] @ rows[pieces].T).mean(0)
            size = (streams[positions] @ states[state]).mean()
            rows[pieces] += ((means.mean() - means + leans) / size)[:, None] * states[state]


def _conversation(
    script: Script, ids: Mapping[str, Sequence[int]], texts: Sequence[Sequence[int]]
) -> tuple[list[int], dict[Fork, list[int]]]:
    """Return tokens of alternating texts and random replies, and the positions of each choice."""
    r = random.Random(0)
    tokens: list[int] = []
    forks: dict[Fork, list[int]] = {}
    while len(tokens) < MOST_TOKENS:
        tokens += [*r.choice(texts)[-MOST_TEXT_TOKENS:], r.choice(list(ids["cue"]))]
        for fork, token in _walk(script, ids, r):
            forks.setdefault(fork, []).append(len(tokens) - 1)
            tokens.append(token)
    return tokens, forks


def _walk(script: Script, ids: Mapping[str, Sequence[int]], r: random.Random) -> Iterator[tuple[Fork, int]]:
    """Yield one random reply: the choice at each place, and the token taken."""
    state, before = "cue", ""
    while True:
        known = script.states[state]
        fork = known.then if known.place is not None else known.after.get(before, known.then)
        if not fork:
            return
        here, before = (state, fork), state
        state = r.choice(fork)
        yield here, r.choice(list(ids[state]))
