"""Places for connections: who has one, and who gives it up for another.

A connection *waits* until its request has come in whole, and again once it is answered. Where all places are taken, or
all of one address, a newcomer gets the place of one that waits: of its own address if that has more than an equal part
of all, else of the one that waits longest. So clients that connect and say nothing keep nobody out, and a proxy, whose
clients all come from one address, loses connections that are idle at most. Those with a request under way never give
way. Knows nothing of sockets.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Literal, Protocol

SITE_BITS = 64  # of an IPv6 address: what one customer gets at least


class Holder(Protocol):
    """A connection that may have a place."""

    def yield_place(self) -> None:
        """Close at once; the place is another's already."""


@dataclass(slots=True)
class _Address:
    """The connections of one address, those that wait in the order in which they began to."""

    num_open: int = 0
    waiting: dict[Holder, None] = field(default_factory=dict)


class Places:
    """`most` places. One address may have `of_address`, a loopback one `of_this_machine`; None: any number.

    For one event loop.
    """

    def __init__(self, most: int, *, of_address: int | None, of_this_machine: int | None) -> None:
        self._most = most
        self._of_address = of_address
        self._of_this_machine = of_this_machine
        self._addresses: dict[str, _Address] = {}
        self._at: dict[Holder, str] = {}
        self._waiting: dict[Holder, None] = {}

    def enter(self, holder: Holder, host: str) -> Literal["taken", "full", "full for the address"]:
        """Give `holder`, which waits, a place, perhaps another's; or none, where nobody who has one waits."""
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
        """Have the one that waits longest give way; whether one did."""
        return self._make_room(self._waiting)

    def _make_room(self, waiting: dict[Holder, None]) -> bool:
        for holder in waiting:
            self.leave(holder)
            holder.yield_place()
            return True
        return False

    def wait(self, holder: Holder) -> None:
        """`holder` has no request under way from now on; no change where it had none. Safe without a place."""
        if holder in self._at:
            self._waiting.setdefault(holder)
            self._addresses[self._at[holder]].waiting.setdefault(holder)

    def work(self, holder: Holder) -> None:
        """`holder` has a request under way. Safe without a place."""
        if holder in self._at:
            self._waiting.pop(holder, None)
            self._addresses[self._at[holder]].waiting.pop(holder, None)

    def leave(self, holder: Holder) -> None:
        """Take the place back; safe without one."""
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
    """What counts as one address: an IPv4 address, or the first 64 bits of an IPv6 one."""
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
