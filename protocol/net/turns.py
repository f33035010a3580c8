"""When strangers have their turn, where what they ask for costs us time.

Whoever has cost little lately goes on at once. All others wait in line until their part of what
may be spent is large enough again.
"""

from __future__ import annotations

import asyncio
import math
from weakref import WeakValueDictionary

from ..fair_share import Tenant, compute_share

_TIMES_FREE = 3
"""Nobody may have had more than three times what is left to others."""

_FADING_FRACTION = 1 / 16
"""Of a half-life: costs fade in such steps, and nobody looks again sooner."""


class Turns:
    """Time of the event loop that tenants have cost lately, and a line of those that wait.

    All together may cost `microseconds` of each second; an address three quarters of that, and a
    client there three quarters of what its address may. Of what they have cost, half is forgotten
    after `half_life_seconds`.
    """

    def __init__(self, microseconds: int, half_life_seconds: float) -> None:
        self._half_life_seconds = half_life_seconds
        self._budget = int(microseconds * half_life_seconds / math.log(2))
        self._costs: dict[Tenant, int] = {}
        self._faded_at = -math.inf
        self._lines: WeakValueDictionary[Tenant | str, asyncio.Lock] = WeakValueDictionary()

    def __repr__(self) -> str:
        cost = sum(self._costs.values())
        return f"<Turns {cost}/{self._budget} us, {len(self._costs)} tenants>"

    def charge(self, tenant: Tenant, microseconds: int) -> None:
        """Note what a tenant has cost."""
        self._fade()
        self._costs[tenant] = self._costs.get(tenant, 0) + microseconds

    def must_wait(self, tenant: Tenant) -> bool:
        """Return whether a tenant has cost too much, or has others that wait before."""
        return tenant in self._lines or self._find_wait_seconds(tenant) > 0.0

    async def wait(self, tenant: Tenant) -> None:
        """Wait for a turn: in order within a client, and among the clients of an address.

        However many wait at an address, one of them looks at the time.
        """
        if not self.must_wait(tenant):
            return
        async with self._join_line(tenant), self._join_line(tenant.address):
            seconds = self._find_wait_seconds(tenant)
            while seconds > 0.0:
                await asyncio.sleep(seconds)
                seconds = self._find_wait_seconds(tenant)

    def _join_line(self, name: Tenant | str) -> asyncio.Lock:
        return self._lines.setdefault(name, asyncio.Lock())

    def _find_wait_seconds(self, tenant: Tenant) -> float:
        """Return after how long a tenant should look again; 0: it may go on."""
        self._fade()
        if sum(self._costs.values()) <= self._budget / 4:  # within the part of any tenant
            return 0.0
        cost = self._costs.get(tenant, 0)
        share = compute_share(tenant, self._costs, self._budget, _TIMES_FREE)
        if cost < share:
            return 0.0
        num_half_lives = math.log2(cost / share) if share else 1.0
        return self._half_life_seconds * min(max(num_half_lives, _FADING_FRACTION), 1.0)

    def _fade(self) -> None:
        now = asyncio.get_running_loop().time()
        num_half_lives = (now - self._faded_at) / self._half_life_seconds
        if num_half_lives < _FADING_FRACTION:
            return
        self._faded_at = now
        left = 0.5**num_half_lives
        faded = {tenant: int(cost * left) for tenant, cost in self._costs.items()}
        self._costs = {tenant: cost for tenant, cost in faded.items() if cost}
