"""The memory of a device as a value, and what follows from its size. Reads nothing: a `Compute` does."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.config import HOT_SHARE, MOST_HOT_BYTES

# Of a card: how much of it is used at all, what stays free of that, and what the largest step takes for scratch and
# partial sums (0.8 GB with 2,048 rows, 1.9 GB with 8,192, of a model of 8 billion parameters).
CARD_SHARE, CARD_RESERVE = 0.92, 500_000_000
STEP_BYTES, ROW_BYTES = 430_000_000, 180_000
LARGE_CARD = 40 * 10**9
LEAST_HOT = 600_000_000  # 16,384 tokens of such a model in 4 bits


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device's memory, in all and free. `on_card`: it is the device's own, not the machine's."""

    total: int
    free: int
    on_card: bool = False

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens in one step, unless settings say."""
        if not self.on_card:
            return 512
        return 8192 if self.total > LARGE_CARD else 2048

    @property
    def weight_bytes(self) -> int:
        """What weights may take of a device that is still free of them."""
        return max(0, self._left(self.chunk_tokens) - LEAST_HOT) if self.on_card else self.total

    def hot_bytes(self, chunk_tokens: int) -> int:
        """What hot KV may take once the weights are there: what they leave of a card, else a part of what is free."""
        return self._left(chunk_tokens) if self.on_card else min(MOST_HOT_BYTES, int(HOT_SHARE * self.free))

    def _left(self, chunk_tokens: int) -> int:
        """What a card has left next to steps of so many rows."""
        used, step = self.total - self.free, STEP_BYTES + ROW_BYTES * chunk_tokens
        return max(0, int(CARD_SHARE * self.total) - used - step - CARD_RESERVE)
