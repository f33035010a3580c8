"""How much of what a peer has one stranger may hold: pure rules over network addresses.

An address is no identity: behind a NAT many clients share one, and on a test machine all do. So
nobody is held to a fixed number, only to a part of what others have left.
"""

import ipaddress
import math
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from .errors import ErrorCode, RefusedError

BUSY_SECONDS = 5.0
"""When to ask again: most generations are over sooner."""

_IPV6_PREFIXES = (32, 48, 56, 64)
"""An IPv6 customer gets a /64 at least, and may have a /56 or a /48 for nothing; a provider, a /32.
All addresses of a /64 count as one."""

_TIMES_BUDGET = 2
"""So many times their budget all strangers may cost, each with what is certain to it."""

_TIMES_FREE_OF_PREFIX = 7
"""The wider prefixes get seven times what they leave to others: more than any address, not all."""


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
    return str(ipaddress.ip_network((int(address), _IPV6_PREFIXES[-1]), strict=False))


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


Holder = str | Tenant
"""Who holds something: an address, or a client at one."""

_Groups = tuple[str, ...]
"""The groups that somebody is in, the widest first; empty: everybody."""


@lru_cache(4096)
def _list_groups(holder: Holder) -> _Groups:
    """Return the groups that a holder is in, the widest first, and itself.

    >>> _list_groups("2001:db8::/64")
    ('2001:db8::/32', '2001:db8::/48', '2001:db8::/56', '2001:db8::/64')
    >>> _list_groups(Tenant("192.0.2.7", "laptop"))
    ('192.0.2.7', 'laptop')
    """
    if isinstance(holder, Tenant):
        return (*_list_groups(holder.address), holder.client)
    try:
        network = ipaddress.IPv6Network(holder)
    except ValueError:
        return (holder,)
    return tuple(str(network.supernet(new_prefix=bits)) for bits in _IPV6_PREFIXES)


def _add(held: dict[_Groups, float], holder: Holder, amount: float) -> None:
    """Count an amount for a holder, for each group that it is in, and for everybody."""
    groups = _list_groups(holder)
    for depth in range(len(groups) + 1):
        held[groups[:depth]] = held.get(groups[:depth], 0) + amount


def _count(held: Mapping[Any, int]) -> dict[_Groups, float]:
    """Return what each group has, given what each holder has."""
    counted: dict[_Groups, float] = {}
    for holder, num in held.items():
        _add(counted, holder, num)
    return counted


def _list_rooms(
    holder: Holder, held: Mapping[_Groups, float], amount: float, times_free: int, extra: int
) -> Iterator[tuple[float, float]]:
    """Yield how much each group of a holder has, and how much of the amount it may have.

    The first is everybody, the last the holder. Nobody may have more than `times_free` times what
    stays free of what the group around it may have, and `extra` more.
    """
    groups = _list_groups(holder)
    num_addresses = len(groups) - isinstance(holder, Tenant)
    num_around = held.get((), 0)
    yield num_around, amount
    for depth in range(1, len(groups) + 1):
        num_held = held.get(groups[:depth], 0)
        times = times_free if depth >= num_addresses else _TIMES_FREE_OF_PREFIX
        others = num_around - num_held
        amount = max(0, amount - others) * times // (times + 1) + extra
        yield num_held, amount
        num_around = num_held


def check_share(holder: Holder, holders: Sequence[Holder], limit: int, of_what: str) -> None:
    """Raise RefusedError unless `holder` may take one more; `holders` are those of all taken ones.

    Nobody may hold more than is free. Alone, an address gets half of the limit and one, which is
    plenty for a household; with n greedy ones, about an (n + 1)th of the limit stays free, so
    that no stranger can shut out those who come later.

    >>> check_share("a", ["a", "a"], 4, "sessions")
    >>> check_share("a", ["a", "a", "a"], 4, "sessions")
    Traceback (most recent call last):
    shoal.protocol.errors.RefusedError: the peer has no room for more sessions of yours
    >>> check_share("b", ["a", "a", "a"], 4, "sessions")

    A client is held to the same within what its address may hold. So clients behind one address do
    not shut each other out, and made-up names get no more than one address does. All of an address
    that give no name count as one client.

    >>> greedy = Tenant("home", "greedy")
    >>> check_share(Tenant("home", "other"), [greedy] * 3, 8, "sessions")
    >>> check_share(greedy, [greedy] * 3, 8, "sessions")
    Traceback (most recent call last):
    shoal.protocol.errors.RefusedError: the peer has no room for more sessions of yours
    """
    rooms = _list_rooms(holder, _count(Counter(holders)), limit, times_free=1, extra=1)
    for depth, (num_held, room) in enumerate(rooms):
        if num_held >= room:
            detail = f"the peer has no room for more {of_what}" + (" of yours" if depth else "")
            raise RefusedError(ErrorCode.BUSY, detail, BUSY_SECONDS)


class FairLimit:
    """A limit on how many of something are held at once, and the present holders."""

    def __init__(self, limit: int, of_what: str) -> None:
        self._limit = limit
        self._of_what = of_what
        self._holders: list[Holder] = []

    @contextmanager
    def hold(self, holder: Holder) -> Generator[None]:
        """Hold one. Raises RefusedError if the holder has more than is left for others."""
        check_share(holder, self._holders, self._limit, self._of_what)
        self._holders.append(holder)
        try:
            yield
        finally:
            self._holders.remove(holder)


def compute_share(
    holder: Holder, held: Mapping[Any, int], num_bytes: int, times_free: int = 1
) -> int:
    """Return how many of `num_bytes` a holder may have, given what each one has.

    Nobody may hold more than `times_free` times what stays free: that holds for an address among
    addresses, and for a client within what its address may hold.

    >>> compute_share(Tenant("a"), {}, 100), compute_share(Tenant("a"), {}, 100, times_free=3)
    (25, 56)
    >>> compute_share(Tenant("b"), {Tenant("a"): 60}, 100)
    10
    >>> compute_share(Tenant("a", "other"), {Tenant("a", "greedy"): 30}, 100)
    10
    """
    *_, (_, share) = _list_rooms(holder, _count(held), num_bytes, times_free, extra=0)
    return int(share)


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


class RecentCosts:
    """Counts the costs of strangers. All of them together have a budget: they may cost `budget` in
    each `seconds`, or at once after a quiet time, and nobody more than three times what stays free.
    Whatever is certain to each, together they never cost more than twice the budget.

    Costs fade: after `seconds` 37 % of one counts. So there is no window at whose beginning all
    come at once. Each may cost `certain` whatever others do: an attacker with many identities pays
    a handshake for each, which costs about as much.

    >>> recent = RecentCosts(100, 10.0, certain=5)
    >>> recent.take("greedy", 75, now=0.0), recent.take("greedy", 1, now=0.1)
    (True, False)
    >>> recent.take("other", 18, now=0.1), recent.take("other", 1, now=0.1)
    (True, False)
    >>> recent.take("third", 6, now=0.1), recent.take("third", 5, now=0.1)
    (False, True)
    >>> recent.take("greedy", 40, now=10.0)
    True
    >>> sum(recent.take(f"made up {number}", 5, now=10.0) for number in range(1000)) < 40
    True
    """

    def __init__(self, budget: float, seconds: float, certain: int = 0) -> None:
        self._budget = budget
        self._seconds = seconds
        self._certain = certain
        self._costs: dict[_Groups, float] = {}
        self._reckoned_at = -math.inf  # later costs are noted with a weight that grows

    def __repr__(self) -> str:
        return f"<RecentCosts of {len(self._costs)} groups, budget {self._budget:.0f}>"

    def take(self, holder: Holder, cost: float, now: float) -> bool:
        """Return whether somebody may cost so much now, and note it then."""
        had, share = self._find_share(holder, now)
        in_all = self._costs.get((), 0.0) / self._reckon(now)
        if had + cost > max(share, self._certain) or in_all + cost > _TIMES_BUDGET * self._budget:
            return False
        self.charge(holder, cost, now)
        return True

    def charge(self, holder: Holder, cost: float, now: float) -> None:
        """Note what somebody has cost."""
        weight = self._reckon(now)  # which may forget what is noted
        _add(self._costs, holder, cost * weight)

    def has_room_for(self, holder: Holder, now: float) -> bool:
        """Return whether somebody may cost anything."""
        had, share = self._find_share(holder, now)
        return had < share

    def _find_share(self, holder: Holder, now: float) -> tuple[float, float]:
        """Return what somebody has cost, and may have."""
        weight = self._reckon(now)
        rooms = _list_rooms(holder, self._costs, self._budget * weight, times_free=3, extra=0)
        *_, (had, share) = rooms
        return had / weight, share / weight

    def _reckon(self, now: float) -> float:
        """Return how much more a cost of now counts than those that are noted."""
        age = (now - self._reckoned_at) / self._seconds
        if not 0 <= age < 1:  # the wall clock may be set back
            faded = {groups: cost * math.exp(-abs(age)) for groups, cost in self._costs.items()}
            self._costs = {groups: cost for groups, cost in faded.items() if cost >= 0.5}
            self._reckoned_at, age = now, 0.0
        return math.exp(age)
