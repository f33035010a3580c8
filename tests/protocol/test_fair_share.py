"""Places at a peer, and strangers who all want some."""

import pytest

from shoal.protocol.errors import ErrorCode, RefusedError
from shoal.protocol.fair_share import (
    RecentCosts,
    SharedBytes,
    Tenant,
    check_share,
    compute_share,
    name_address,
)


def has_room_for(tenant: str, tenants: list[str], num_places: int) -> bool:
    try:
        check_share(tenant, tenants, num_places, "places")
    except RefusedError:
        return False
    return True


@pytest.mark.parametrize("num_places", [1, 2, 3, 8, 256])
def test_a_lone_stranger_gets_half_of_the_places_and_all_strangers_together_all(
    num_places: int,
) -> None:
    tenants: list[str] = []
    while has_room_for("greedy", tenants, num_places):
        tenants.append("greedy")

    assert len(tenants) == num_places // 2 + 1
    for number in range(num_places - len(tenants)):
        assert has_room_for(f"newcomer {number}", tenants, num_places)
        tenants.append(f"newcomer {number}")
    assert not has_room_for("too late", tenants, num_places)


def test_greedy_strangers_leave_a_fair_part_to_the_next_one() -> None:
    tenants: list[str] = []
    for number in range(7):
        while has_room_for(f"greedy {number % 7}", tenants, 256):
            tenants.append(f"greedy {number % 7}")

    assert has_room_for("newcomer", tenants, 256)


def count_taken(tenant: Tenant, tenants: list[Tenant], num_places: int) -> int:
    """Let a tenant take what it can get; return how many places that was."""
    before = len(tenants)
    while len(tenants) <= num_places:
        try:
            check_share(tenant, tenants, num_places, "places")
        except RefusedError:
            break
        tenants.append(tenant)
    return len(tenants) - before


def test_clients_of_one_address_leave_each_other_their_part() -> None:
    tenants: list[Tenant] = []

    taken = [count_taken(Tenant("home", name), tenants, 256) for name in "abc"]

    assert taken == [65, 33, 16]
    assert count_taken(Tenant("elsewhere", "d"), tenants, 256) > 30


def test_clients_share_only_what_strangers_leave_to_their_address() -> None:
    tenants = [Tenant(f"stranger {number}") for number in range(4)]

    taken = [count_taken(Tenant("home", name), tenants, 8) for name in "ab"]

    assert taken == [2, 1]


def test_refusal_names_what_there_is_no_memory_for() -> None:
    with pytest.raises(RefusedError, match="too many tensors are waiting"):
        SharedBytes(1, of_what="tensors").check_room_for(Tenant("a"), 2)


def test_bytes_are_shared_like_places_and_free_again_when_they_are_gone() -> None:
    shared, greedy, other = SharedBytes(100), Tenant("greedy"), Tenant("other")
    shared.check_room_for(greedy, 25)
    shared.count(greedy, 25)

    with pytest.raises(RefusedError) as refusal:
        shared.check_room_for(greedy, 1)
    assert refusal.value.code is ErrorCode.BUSY
    assert refusal.value.retry_after_seconds
    shared.check_room_for(other, 18)
    with pytest.raises(RefusedError):
        shared.check_room_for(other, 19)

    shared.count(other, 18)
    assert shared.used_bytes == 43
    shared.count(greedy, -25)
    assert repr(shared) == "<SharedBytes 18/100, 1 tenants>"
    shared.check_room_for(greedy, 20)


def test_names_that_are_made_up_get_no_more_than_one_address() -> None:
    liars: list[Tenant] = []
    for number in range(300):
        count_taken(Tenant("home", f"liar {number}"), liars, 256)

    assert len(liars) == 129


def test_those_of_an_address_that_give_no_name_count_as_one_client() -> None:
    tenants: list[Tenant] = []

    assert count_taken(Tenant("home"), tenants, 256) == 65
    assert count_taken(Tenant("home", "honest"), tenants, 256) == 33
    assert compute_share(Tenant("home", "honest"), {Tenant("home"): 25}, 100) == 12
    assert compute_share(Tenant("home"), {Tenant("home"): 25}, 100) == 25


def test_places_that_are_given_back_are_for_everybody_again() -> None:
    with pytest.raises(RefusedError) as refusal:
        check_share("a", ["a"] * 5, 8, "places")
    assert refusal.value.code is ErrorCode.BUSY
    assert refusal.value.retry_after_seconds
    assert has_room_for("a", ["a"] * 4, 8)


IPV6 = "2001:db8:{}:{:02x}{:02x}::/64"


def count_taken_by_prefix(prefix: int, holders: list[str], num_places: int) -> int:
    """Let who has an IPv6 prefix take what he can get with all his networks, or many of them."""
    num_networks = {32: 2**10, 48: 2**8, 56: 2**4, 64: 1}[prefix]
    names = [
        IPV6.format(
            number % 64 if prefix < 48 else 1,
            number % 16 if prefix < 56 else 1,
            number % 256 if prefix < 64 else 1,
        )
        for number in range(num_networks)
    ]
    before = len(holders)
    while True:
        num_holders = len(holders)
        for name in names:
            if has_room_for(name, holders, num_places):
                holders.append(name)
        if len(holders) == num_holders:
            return num_holders - before


def test_wider_ipv6_prefixes_get_more_and_leave_room_to_everybody_else() -> None:
    taken = {prefix: count_taken_by_prefix(prefix, [], 256) for prefix in (64, 56, 48, 32)}

    assert 70 < taken[64] < taken[56] < taken[48] < taken[32] <= 225
    holders: list[str] = []
    count_taken_by_prefix(48, holders, 256)
    for newcomer in ("192.0.2.7", "2001:db8:7::/64", "2a00::/64"):
        assert has_room_for(newcomer, holders, 256), newcomer


def test_bytes_are_shared_among_ipv6_prefixes() -> None:
    networks = [Tenant(f"2001:db8:1:{number:02x}00::/64") for number in range(256)]
    shared = SharedBytes(2**20)
    for tenant in networks * 4:
        if shared.has_room_for(tenant, 2**12):
            shared.count(tenant, 2**12)

    assert 2**19 < shared.used_bytes < 2**20 * 4 // 5
    assert shared.find_share(Tenant("192.0.2.7"))[1] > 2**15
    assert shared.find_share(Tenant("2001:db8:2::/64"))[1] > 2**12


def test_address_that_costs_as_much_as_it_can_gets_three_quarters_of_what_all_may_cost() -> None:
    recent, num_minutes = RecentCosts(100, 60.0), 60

    times = range(num_minutes * 60 * 10)
    num_taken = sum(recent.take("greedy", 1, now=number / 10) for number in times)

    assert 0.9 < num_taken / (num_minutes * 75) < 1.1


def test_costs_are_forgotten_when_the_clock_is_set_back() -> None:
    recent = RecentCosts(100, 60.0)
    assert recent.take("greedy", 75, now=1e9)

    assert recent.take("greedy", 75, now=0.0)
    assert not recent.take("greedy", 75, now=1.0)


def test_many_strangers_get_what_is_certain_and_no_more_each() -> None:
    """And no more in all than twice the budget: identities cost little."""
    recent, names = RecentCosts(100, 60.0, certain=2), [f"{number}" for number in range(500)]

    taken = {name: sum(recent.take(name, 1, now=0.0) for _ in range(100)) for name in names}

    assert sum(num > 2 for num in taken.values()) < 5
    assert min([taken[name] for name in names[:50]]) == 2
    assert sum(taken.values()) == 200


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::9", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("peer-a", "peer-b", False),
        (None, "", True),
    ],
)
def test_who_counts_as_one(one: str | None, other: str, is_same: bool) -> None:
    assert (name_address(one) == name_address(other)) is is_same
