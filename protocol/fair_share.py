"""How much of what a peer has one stranger may hold: pure rules over network addresses.

An address is no identity: behind a NAT many clients share one, and on a test machine all do. So
nobody is held to a fixed number, only to a part of what others have left.
"""

import ipaddress
from collections import Counter
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from .errors import ErrorCode, RefusedError

BUSY_SECONDS = 5.0
"""When to ask again: most generations are over sooner."""

_IPV6_NETWORK_BITS = 64
"""The prefix that a provider gives to one customer, at least; all its addresses count as one."""


def name_address(remote_host: str | None) -> str:
    """Return the name under which everything from one remote host is counted.

    Ends whose transport does not know where they are count together, as one.

    >>> name_address("192.0.2.7"), name_address("2001:db8::1:2"), name_address("::ffff:192.0.2.7")
    ('192.0.2.7', '2001:db8::/64', '192.0.2.7')
    """
    try:
        address = ipaddress.ip_address(remote_host or "")
    except ValueError:
        return remote_host or "unknown"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _IPV6_NETWORK_BITS), strict=False))


def name_network(remote_host: str | None) -> str:
    """Return the name of the network around a host: what one owner often has whole.

    >>> name_network("192.0.2.7"), name_network("2001:db8:1::1"), name_network("")
    ('192.0.0.0/16', '2001:db8::/32', 'unknown')
    """
    try:
        address = ipaddress.ip_address(remote_host or "")
    except ValueError:
        return remote_host or "unknown"
    num_bits = 16 if address.version == 4 else 32
    return str(ipaddress.ip_network(f"{address}/{num_bits}", strict=False))


class Tenant(NamedTuple):
    """The tenant of a stream or session: an address, and the name of a client there."""

    address: str
    client: str = ""


def check_share(holder: str, holders: Sequence[str], limit: int, of_what: str) -> None:
    """Raise RefusedError unless `holder` may take one more; `holders` are those of all taken ones.

    Nobody may hold more than is free. Alone, an address gets half of the limit and one, which is
    plenty for a household; with n greedy ones, about an (n + 1)th of the limit stays free, so
    that no stranger can shut out those who come later.

    >>> check_share("a", ["a", "a"], 4, "sessions")
    >>> check_share("a", ["a", "a", "a"], 4, "sessions")
    Traceback (most recent call last):
    shoal.protocol.errors.RefusedError: the peer has no room for more sessions of yours
    >>> check_share("b", ["a", "a", "a"], 4, "sessions")
    """
    num_free = limit - len(holders)
    if num_free <= 0:
        raise RefusedError(ErrorCode.BUSY, f"the peer has no room for more {of_what}", BUSY_SECONDS)
    if holders.count(holder) > num_free:
        detail = f"the peer has no room for more {of_what} of yours"
        raise RefusedError(ErrorCode.BUSY, detail, BUSY_SECONDS)


def check_client_share(tenant: Tenant, tenants: Sequence[Tenant], limit: int, of_what: str) -> None:
    """Do the same twice: for the address, and for the client within what its address may hold.

    So clients behind one address do not shut each other out, and made-up names get no more
    than one address does. All of an address that give no name count as one client.

    >>> greedy = Tenant("home", "greedy")
    >>> check_client_share(Tenant("home", "other"), [greedy] * 3, 8, "sessions")
    >>> check_client_share(greedy, [greedy] * 3, 8, "sessions")
    Traceback (most recent call last):
    shoal.protocol.errors.RefusedError: the peer has no room for more sessions of yours
    """
    addresses = [other.address for other in tenants]
    check_share(tenant.address, addresses, limit, of_what)
    num_of_others = len(addresses) - addresses.count(tenant.address)
    limit_here = (limit - num_of_others) // 2 + 1
    clients = [other.client for other in tenants if other.address == tenant.address]
    check_share(tenant.client, clients, limit_here, of_what)


class FairLimit:
    """A limit on how many of something are held at once, and the present tenants."""

    def __init__(self, limit: int, of_what: str) -> None:
        self._limit = limit
        self._of_what = of_what
        self._tenants: list[Tenant] = []

    @contextmanager
    def hold(self, tenant: Tenant) -> Generator[None]:
        """Hold one. Raises RefusedError if the tenant has more than is left for others."""
        check_client_share(tenant, self._tenants, self._limit, self._of_what)
        self._tenants.append(tenant)
        try:
            yield
        finally:
            self._tenants.remove(tenant)


def compute_share(
    tenant: Tenant, held: Mapping[Tenant, int], num_bytes: int, times_free: int = 1
) -> int:
    """Return how many of `num_bytes` a tenant may have, given what each tenant has.

    Nobody may hold more than `times_free` times what stays free: that holds for an address among
    addresses, and for a client within what its address may hold.

    >>> compute_share(Tenant("a"), {}, 100), compute_share(Tenant("a"), {}, 100, times_free=3)
    (25, 56)
    >>> compute_share(Tenant("b"), {Tenant("a"): 60}, 100)
    10
    >>> compute_share(Tenant("a", "other"), {Tenant("a", "greedy"): 30}, 100)
    10
    """
    strangers = neighbours = 0
    for other, num_held in held.items():
        if other.address != tenant.address:
            strangers += num_held
        elif other.client != tenant.client:
            neighbours += num_held
    of_address = (num_bytes - strangers) * times_free // (times_free + 1)
    return max(0, (of_address - neighbours) * times_free // (times_free + 1))


class SharedBytes:
    """A budget of memory for unread bytes of strangers, with each tenant's part."""

    def __init__(self, budget_bytes: int, times_free: int = 1, of_what: str = "steps") -> None:
        """Let nobody hold more than `times_free` times what stays free."""
        self._of_what = of_what
        self.budget_bytes = budget_bytes
        self._times_free = times_free
        self._held: Counter[Tenant] = Counter()

    def __repr__(self) -> str:
        return f"<SharedBytes {self.used_bytes}/{self.budget_bytes}, {len(self._held)} tenants>"

    @property
    def used_bytes(self) -> int:
        """Bytes that all tenants have together."""
        return self._held.total()

    def check_room_for(self, tenant: Tenant, num_bytes: int) -> None:
        """Raise RefusedError unless a tenant may have so many bytes more."""
        if not self.has_room_for(tenant, num_bytes):
            detail = f"too many {self._of_what} are waiting at this peer; try again later"
            raise RefusedError(ErrorCode.BUSY, detail, 1.0)

    def count(self, tenant: Tenant, num_bytes: int) -> None:
        """Enter bytes of a tenant into the account, or strike them if there are less than none."""
        self._held[tenant] += num_bytes
        if not self._held[tenant]:
            del self._held[tenant]

    def has_room_for(self, tenant: Tenant, num_bytes: int) -> bool:
        """Return whether a tenant may have so many bytes more."""
        held_bytes, share_bytes = self.find_share(tenant)
        return held_bytes + num_bytes <= share_bytes

    def find_share(self, tenant: Tenant) -> tuple[int, int]:
        """Return how many bytes a tenant has, and how many of all it may have at present."""
        share_bytes = compute_share(tenant, self._held, self.budget_bytes, self._times_free)
        return self._held[tenant], share_bytes


def may_displace(asker: Tenant, idle: Tenant, held: Mapping[Tenant, int], num_bytes: int) -> bool:
    """Return whether memory of an idle tenant may be given to a request of `num_bytes`.

    The asker's own memory always; that of others only down to as much as the asker has then. So no
    tenant can drive a small one out by asking for more and more.

    >>> held = {Tenant("a"): 60, Tenant("b"): 20}
    >>> may_displace(Tenant("b"), Tenant("a"), held, 10)
    True
    >>> may_displace(Tenant("a"), Tenant("b"), held, 10)
    False
    """
    if asker == idle:
        return True

    def count(tenant: Tenant) -> int:
        if asker.address == idle.address:
            return held.get(tenant, 0)
        return sum(n for other, n in held.items() if other.address == tenant.address)

    return count(asker) + num_bytes < count(idle)


WINDOW_SECONDS = 10.0


class WindowBudget:
    """Counts what strangers cost within ten seconds; nobody gets more than stays free.

    Each gets `certain` whatever others take: an attacker with many identities pays a handshake for
    each, which costs about as much.

    >>> budget = WindowBudget(100, certain=5)
    >>> budget.take("greedy", 50, now=0.0), budget.take("greedy", 1, now=1.0)
    (True, False)
    >>> budget.take("other", 25, now=1.0), budget.take("other", 1, now=1.0)
    (True, False)
    >>> budget.take("third", 5, now=2.0), budget.take("greedy", 1, now=WINDOW_SECONDS)
    (True, True)
    """

    def __init__(self, limit: int, certain: int) -> None:
        self._limit = limit
        self._certain = certain
        self._begun_at = float("-inf")
        self._taken: dict[Hashable, int] = {}
        self._num_taken = 0

    def take(self, stranger: Hashable, cost: int, now: float) -> bool:
        """Return whether a stranger may cost so much now, and count it then."""
        if not 0 <= now - self._begun_at < WINDOW_SECONDS:
            self._begun_at, self._taken, self._num_taken = now, {}, 0
        num_before = self._taken.get(stranger, 0)
        share = (self._limit - (self._num_taken - num_before)) // 2
        if num_before + cost > max(share, self._certain):
            return False
        self._taken[stranger] = num_before + cost
        self._num_taken += cost
        return True
