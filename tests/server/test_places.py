"""Places for connections: who gives way to whom, against a model that looks at everybody."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.server.connections import Places, is_this_machine, network_of

HOSTS = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "127.0.0.1")


@dataclass(eq=False)
class Connection:
    """A connection that notes whether it had to go."""

    host: str = HOSTS[0]
    is_gone: bool = False
    closed: list[Connection] = field(default_factory=list)

    def yield_place(self) -> None:
        assert not self.is_gone
        self.is_gone = True


def test_who_waits_longest_gives_way_and_who_works_stays() -> None:
    places = Places(3, of_address=None, of_this_machine=None)
    first, second, third, fourth, fifth, sixth = (Connection() for _ in range(6))
    for each in (first, second, third):
        assert places.enter(each, each.host) == "taken"
    places.work(first)
    assert places.enter(fourth, fourth.host) == "taken"
    assert [each.is_gone for each in (first, second, third, fourth)] == [False, True, False, False]
    places.work(third)
    places.work(fourth)
    assert places.enter(fifth, fifth.host) == "full"
    places.wait(first)
    assert places.enter(fifth, fifth.host) == "taken"
    assert first.is_gone and not fifth.is_gone
    places.leave(third)
    assert places.enter(sixth, sixth.host) == "taken"
    assert not fifth.is_gone
    places.check()


def test_one_address_has_no_more_than_its_part() -> None:
    places = Places(10, of_address=2, of_this_machine=None)
    mine, other = [Connection() for _ in range(4)], Connection(HOSTS[1])
    assert places.enter(other, other.host) == "taken"
    for each in mine[:3]:
        assert places.enter(each, each.host) == "taken"
    assert [each.is_gone for each in (*mine, other)] == [True, False, False, False, False]
    places.work(mine[1])
    places.work(mine[2])
    assert places.enter(mine[3], mine[3].host) == "full for the address"
    here = [Connection(HOSTS[3]) for _ in range(7)]
    assert {places.enter(each, each.host) for each in here} == {"taken"}
    places.check()


def test_an_address_with_many_connections_takes_places_from_itself() -> None:
    places = Places(8, of_address=None, of_this_machine=None)
    quiet, many = Connection(HOSTS[1]), [Connection() for _ in range(40)]
    for each in (quiet, *many):
        assert places.enter(each, each.host) == "taken"
    assert not quiet.is_gone
    assert sum(each.is_gone for each in many) == 33


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::1", "::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a socket file", "a socket file"),
    ],
)
def test_an_address_is_what_one_customer_has(host: str, network: str) -> None:
    assert network_of(host) == network
    assert is_this_machine(network) == (host == "::1")


@given(st.lists(st.tuples(st.sampled_from(HOSTS), st.integers(0, 3), st.integers(0, 30)), max_size=60))
def test_places_hold_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    places = Places(5, of_address=3, of_this_machine=4)
    everybody: list[Connection] = []
    working: set[Connection] = set()
    for host, kind, at in steps:
        if kind == 0:
            connection = Connection(host)
            before = [each for each in everybody if not each.is_gone]
            verdict = places.enter(connection, host)
            if verdict == "taken":
                everybody.append(connection)
            else:
                of_host = [each for each in before if each.host == host]
                assert working.issuperset(before if verdict == "full" else of_host), "somebody waited"
                assert all(not each.is_gone for each in before)
        elif everybody:
            connection = everybody[at % len(everybody)]
            if kind == 1:
                places.work(connection)
                working |= set() if connection.is_gone else {connection}
            elif kind == 2:
                places.wait(connection)
                working.discard(connection)
            else:
                places.leave(connection)
                everybody.remove(connection)
                working.discard(connection)
        open_now = [each for each in everybody if not each.is_gone]
        assert not any(each.is_gone for each in working)
        assert len(open_now) <= 5
        for name, count in Counter(each.host for each in open_now).items():
            assert count <= (4 if name == HOSTS[3] else 3)
        places.check()
