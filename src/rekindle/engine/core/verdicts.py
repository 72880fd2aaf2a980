"""What checks of restored blocks found, by the hash of the block: for receipts of what read them.

Of the last ones only, and since the start. On the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.types import Verdict

MOST = 1 << 15  # some 5 MB


class Verdicts:
    """At most `most` blocks; a new one takes the place of the oldest."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._differed: OrderedDict[BlockHash, bool] = OrderedDict()

    def note(self, hashes: Iterable[BlockHash], *, differed: bool) -> None:
        """Note that these blocks were as computed again; or that one of them was not, after which the others came."""
        for each in hashes:
            self._differed[each] = differed
            self._differed.move_to_end(each)
            if len(self._differed) > self._most:
                self._differed.popitem(last=False)

    def of(self, hashes: Sequence[BlockHash]) -> Verdict:
        """Return what is known of these blocks."""
        known = [self._differed[each] for each in dict.fromkeys(hashes) if each in self._differed]
        return Verdict(known.count(False), known.count(True))
