"""Resume points: positions of a stored sequence at which the state of every layer is at hand.

Blocks alone are enough for layers with full attention. A layer with a window also needs its parts of the blocks in the
window before the position, a recurrent layer its state at the end of the last one; other blocks have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rekindle.cache.blocks.windows import first_needed


def resume_position(
    num_tokens: int, windows: Sequence[int], block_tokens: int, has_part: Callable[[int, int], bool]
) -> int:
    """Return the last resume point among the first `num_tokens` of a stored sequence; 0 if there is none.

    `has_part(index, which)`: whether block `index` of the sequence has its part for `windows[which]`. It is asked once
    for each block of a window, and for one of each block that the point moves back.
    """
    position, at = num_tokens, 0
    first_known = [-(-num_tokens // block_tokens)] * len(windows)  # blocks from here on have their parts
    while at < len(windows):
        needed = first_needed(position, windows[at], block_tokens)
        while first_known[at] > needed and has_part(first_known[at] - 1, at):
            first_known[at] -= 1
        if first_known[at] <= needed:
            at += 1
            continue
        missing = first_known[at] - 1
        position, at = missing * block_tokens, 0
        first_known = [min(first, missing) for first in first_known]
    return position
