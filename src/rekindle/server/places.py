"""Places for connections: which connections hold one, and which must yield it to another.

A connection *waits* until its request has arrived completely, and again once it is answered. If all places, or all of
one address, are taken, a new connection gets the place of a waiting one: one of its own address if that holds more than
an equal share, else the one that has waited longest. So clients that connect and send nothing block nobody, and a
proxy, whose clients share one address, loses idle connections at most. Connections with a request in progress never
yield. Knows nothing of sockets.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Literal, Protocol

SITE_BITS = 64  # prefix of an IPv6 address: one customer gets at least this network


class Holder(Protocol):
    """A connection that may hold a place."""

    def yield_place(self) -> None:
        """Close at once; the place is already taken away."""


@dataclass(slots=True)
class _Address:
    """The connections of one address; the waiting ones in the order in which they began to wait."""

    num_open: int = 0
    waiting: dict[Holder, None] = field(default_factory=dict)


class Places:
    """Up to `most` places, for one event loop.

    One address may hold `of_address`, a loopback one `of_this_machine`; None: any number.
    """

    def __init__(self, most: int, *, of_address: int | None, of_this_machine: int | None) -> None:
        self._most = most
        self._of_address = of_address
        self._of_this_machine = of_this_machine
        self._addresses: dict[str, _Address] = {}
        self._at: dict[Holder, str] = {}
        self._waiting: dict[Holder, None] = {}

    def enter(self, holder: Holder, host: str) -> Literal["taken", "full", "full for the address"]:
        """Give `holder`, which waits, a place, if need be another waiting one's; else return which limit is full."""
        key = network_of(host)
        address = self._addresses.get(key, _Address())
        most = self._of_this_machine if is_this_machine(key) else self._of_address
        if most is not None and address.num_open >= most and not self._make_room(address.waiting):
            return "full for the address"
        is_large = address.num_open * (len(self._addresses) + (key not in self._addresses)) > self._most
        if len(self._at) >= self._most and not ((is_large and self._make_room(address.waiting)) or self.reclaim_one()):
            return "full"
        address = self._addresses.setdefault(key, address)
        address.num_open += 1
        self._at[holder] = key
        self.wait(holder)
        return "taken"

    def reclaim_one(self) -> bool:
        """Take the place of the connection that has waited longest; return whether there was one."""
        return self._make_room(self._waiting)

    def _make_room(self, waiting: dict[Holder, None]) -> bool:
        for holder in waiting:
            self.leave(holder)
            holder.yield_place()
            return True
        return False

    def wait(self, holder: Holder) -> None:
        """Mark `holder` as waiting, with no request in progress; no change if it was. Safe without a place."""
        if holder in self._at:
            self._waiting.setdefault(holder)
            self._addresses[self._at[holder]].waiting.setdefault(holder)

    def work(self, holder: Holder) -> None:
        """Mark `holder` as having a request in progress. Safe without a place."""
        if holder in self._at:
            self._waiting.pop(holder, None)
            self._addresses[self._at[holder]].waiting.pop(holder, None)

    def leave(self, holder: Holder) -> None:
        """Release the place of `holder`; safe without one."""
        self.work(holder)
        key = self._at.pop(holder, None)
        if key is not None:
            address = self._addresses[key]
            address.num_open -= 1
            if not address.num_open:
                del self._addresses[key]

    def check(self) -> None:
        """Assert that the addresses add up to the places that are taken."""
        assert len(self._at) <= self._most, len(self._at)
        assert sum(each.num_open for each in self._addresses.values()) == len(self._at)
        waiting = [holder for each in self._addresses.values() for holder in each.waiting]
        assert set(waiting) == set(self._waiting) and len(waiting) == len(self._waiting)
        assert set(waiting) <= set(self._at)


def network_of(host: str) -> str:
    """Return the network that counts as one address: an IPv4 address, or the first 64 bits of an IPv6 one."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(address) >> SITE_BITS << SITE_BITS, SITE_BITS)))
    return str(address)


def is_this_machine(network: str) -> bool:
    """Whether it is a loopback address."""
    try:
        return ipaddress.ip_address(network).is_loopback
    except ValueError:
        return False
