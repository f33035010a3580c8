"""When strangers have their turn, where what they ask for costs us time.

Whoever has cost little lately goes on at once. All others wait in line until their part of what
may be spent is large enough again.
"""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from ..fair_share import RecentCosts, Tenant

_LOOK_FRACTION = 1 / 16
"""Of the time in which costs fade: after so long, the first of each line looks again. Later ones
would leave more of the time to others than their share."""


class Turns:
    """Time of the event loop that tenants have cost lately, and a line of those that wait.

    All together may cost `microseconds` of each second; an address three quarters of that, and a
    client there three quarters of what its address may. A cost counts for 37 % after `seconds`.
    """

    def __init__(self, microseconds: int, seconds: float) -> None:
        self._look_seconds = seconds * _LOOK_FRACTION
        self._costs = RecentCosts(microseconds * seconds, seconds)
        self._lines: WeakValueDictionary[Tenant | str, asyncio.Lock] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<Turns {self._costs!r}, {len(self._lines)} lines>"

    def charge(self, tenant: Tenant, microseconds: int) -> None:
        """Note what a tenant has cost."""
        self._costs.charge(tenant, microseconds, asyncio.get_running_loop().time())

    def must_wait(self, tenant: Tenant) -> bool:
        """Return whether a tenant has cost too much, or has others that wait before."""
        return tenant in self._lines or not self._has_room_for(tenant)

    async def wait(self, tenant: Tenant) -> None:
        """Wait for a turn: in order within a client, and among the clients of an address.

        However many wait at an address, one of them looks at the time.
        """
        if not self.must_wait(tenant):
            return
        async with self._join_line(tenant), self._join_line(tenant.address):
            while not self._has_room_for(tenant):  # noqa: ASYNC110 - time makes room, nobody else
                await asyncio.sleep(self._look_seconds)

    def _join_line(self, name: Tenant | str) -> asyncio.Lock:
        return self._lines.setdefault(name, asyncio.Lock())

    def _has_room_for(self, tenant: Tenant) -> bool:
        return self._costs.has_room_for(tenant, asyncio.get_running_loop().time())
