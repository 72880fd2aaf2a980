"""Receipts that are not in the file yet, by answer and choice; the newest ones where there are too many.

Knows neither file nor thread: its owner guards every call with a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from rekindle.server.observers.receipts import Receipt

MOST = 1024


class WaitingReceipts:
    """At most `most` receipts, in the order they came."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._receipts: OrderedDict[tuple[str, str, int], Receipt] = OrderedDict()  # by namespace, id, choice

    def __len__(self) -> int:
        return len(self._receipts)

    def add(self, receipt: Receipt) -> None:
        """Add a receipt, in the place of one of the same answer and choice; drop the oldest beyond `most`."""
        self._receipts[receipt.namespace, receipt.id, receipt.choice] = receipt
        if len(self._receipts) > self._most:
            self._receipts.popitem(last=False)

    def of(self, namespace: str, id: str) -> dict[int, Receipt]:
        """Return the receipts of an answer by choice."""
        return {key[2]: each for key, each in self._receipts.items() if key[:2] == (namespace, id)}

    def all(self) -> list[Receipt]:
        """Return all of them."""
        return list(self._receipts.values())

    def drop(self, is_gone: Callable[[Receipt], bool]) -> None:
        """Drop those for which this is true."""
        for key in [key for key, each in self._receipts.items() if is_gone(each)]:
            del self._receipts[key]

    def written(self, receipts: Iterable[Receipt]) -> None:
        """Drop these, but not what has taken the place of one meanwhile."""
        done = set(map(id, receipts))
        self.drop(lambda each: id(each) in done)
