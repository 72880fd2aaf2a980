"""A consistent hash ring: which replica a session belongs to, the same for every router without shared state.

Each replica has POINTS places on a circle; a session belongs to the first place after its own. When a replica is away,
only its sessions move, and they return with it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container
from hashlib import blake2b

POINTS = 128  # places of a replica: shares of the circle differ by about a tenth


class Ring:
    """The places of `num_replicas` replicas, drawn by `seed`."""

    def __init__(self, num_replicas: int, seed: int) -> None:
        self._seed = seed
        places = sorted(
            (self._place(f"replica {number}, point {point}"), number)
            for number in range(num_replicas)
            for point in range(POINTS)
        )
        self._places = [place for place, _ in places]
        self._owners = [number for _, number in places]

    def owner(self, session: int, live: Container[int]) -> int:
        """Return the replica in `live` whose place comes first after the session's; ValueError if none is there."""
        start = bisect_right(self._places, self._place(f"session {session}"))
        for owner in (*self._owners[start:], *self._owners[:start]):
            if owner in live:
                return owner
        raise ValueError("no replica of the ring is live")

    def _place(self, name: str) -> int:
        return int.from_bytes(blake2b(f"{self._seed}: {name}".encode(), digest_size=8).digest())
