"""Links on their way to being closed, whatever becomes of those who gave them up."""

import asyncio
from collections.abc import Iterable

from .hop_link import HopLink


class Farewells:
    """Closes links in tasks of their own. Owned by a client, which waits for the last ones.

    Whoever hangs up may be cancelled at any moment; by then nobody else holds the link, and its
    peer would keep the session and its cache.
    """

    def __init__(self) -> None:
        self._closing: set[asyncio.Task[None]] = set()

    async def hang_up(self, links: Iterable[HopLink]) -> None:
        """Close links and wait for that; they are closed even when the wait is cancelled."""
        tasks = [asyncio.create_task(link.close()) for link in links]
        self._closing.update(tasks)
        for task in tasks:
            task.add_done_callback(self._closing.discard)
        if tasks:
            await asyncio.shield(asyncio.gather(*tasks))

    async def finish(self) -> None:
        """Wait for what is still being closed; each link takes about a second at the most."""
        if self._closing:
            await asyncio.wait(self._closing)
