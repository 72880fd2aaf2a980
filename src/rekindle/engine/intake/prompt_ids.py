"""The ids of a prompt: stored ids up to where its text leaves the branch, then a fresh encoding."""

from __future__ import annotations

import math

import numpy as np

from rekindle.matching.matcher import TextMatch
from rekindle.text.prompt import PromptEncoder, RenderedPrompt


def prompt_ids(
    encoder: PromptEncoder, match: TextMatch, rendered: RenderedPrompt, *, most: float = math.inf
) -> tuple[np.ndarray, int]:
    """Return the ids to run [tokens], uint32, and how many of them are known to be a fresh encoding of their text.

    Raises PromptTooLong if more than `most` tokens must be encoded.
    """
    branch = match.branch
    if branch is None or match.num_tokens == 0:
        ids = encoder.encode(rendered, most=most)
        return ids, len(ids)
    rest = encoder.encode_rest(rendered, match.resume_byte, most=most)
    ids = np.concatenate([branch.ids[: match.num_tokens], rest])
    return ids, len(ids) if match.num_tokens <= branch.canonical_tokens else branch.canonical_tokens
