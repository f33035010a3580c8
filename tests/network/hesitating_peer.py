"""A `shoal` that is asked to end (SIGTERM) when it has announced itself and not said so yet.

python hesitating_peer.py serve MODEL ...
"""

import asyncio
import os
import signal
import sys

from shoal.cli.main import main
from shoal.peer import peer
from shoal.peer.announcing.announcer import Announcer
from shoal.protocol.records.announcements import PeerState


class HesitatingAnnouncer(Announcer):
    async def announce(self, state: PeerState) -> None:
        await super().announce(state)
        if state is PeerState.ONLINE:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()


if __name__ == "__main__":
    peer.Announcer = HesitatingAnnouncer  # type: ignore[misc]
    sys.exit(main())
