"""How many connections strangers may have a peer open: so many at a time, and in a minute."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Collection

from ...protocol.errors import ErrorCode, RefusedError
from ...protocol.fair_share import BUSY_SECONDS, check_room_for
from ...protocol.net.clock import Clock

_MAX_AT_ONCE = 8
_MAX_A_MINUTE = 128
"""For all addresses; a single one gets half of them and one. Sessions share open ones."""

_TURN_SECONDS = 5.0
"""Time that a dial may wait for others; the session can go another way."""


class DialBudget:
    """Dials per address. No address may take more than it leaves to others."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._dialling: list[str] = []
        self._counted: deque[tuple[float, str]] = deque()
        self._changed = asyncio.Event()

    def count(self, address: str) -> None:
        """Count a connection that an address asks for. Raises RefusedError when it is too much."""
        now = self._clock.now()
        while self._counted and now - self._counted[0][0] >= 60.0:
            self._counted.popleft()
        counted = [other for _, other in self._counted]
        check_room_for(address, counted, _MAX_A_MINUTE, "connections to other peers")
        self._counted.append((now, address))

    @contextlib.asynccontextmanager
    async def take_turn(self, askers: Collection[str]) -> AsyncGenerator[str]:
        """Dial when one of the addresses that ask for it may; yields that address.

        Raises RefusedError when none of them may for too long.
        """
        try:
            async with asyncio.timeout(_TURN_SECONDS):
                while (address := self._find_turn(askers)) is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            detail = "too many connections to other peers are being opened"
            raise RefusedError(ErrorCode.BUSY, detail, BUSY_SECONDS) from error
        self._dialling.append(address)
        try:
            yield address
        finally:
            self._dialling.remove(address)
            self.look_again()

    def look_again(self) -> None:
        """Admit waiting dials: a turn is over, or more addresses ask for the same."""
        self._changed.set()

    def _find_turn(self, askers: Collection[str]) -> str | None:
        for address in askers:
            with contextlib.suppress(RefusedError):
                check_room_for(address, self._dialling, _MAX_AT_ONCE, "dials")
                return address
        return None
