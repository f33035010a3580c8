"""What a peer that cannot be dialled does about its relays for as long as it runs."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from ...protocol.endpoints import Relay
from ...protocol.errors import DirectoryError
from ...protocol.ids import ModelId
from ..resident import PeerEvent, Report
from .announcer import Announcer
from .self_description import SelfDescription

_logger = logging.getLogger(__name__)

_LOOK_SECONDS = 3.0
"""How often to see whether relays are there. A step of a client waits for twenty seconds."""


class RelayedDirectory(Protocol):
    """A directory through whose relays streams come to us."""

    @property
    def relays(self) -> Sequence[Relay]: ...

    async def renew_relays(self, model_id: ModelId) -> bool: ...


async def watch_relays(
    directory: RelayedDirectory,
    model_id: ModelId,
    description: SelfDescription,
    announcer: Announcer,
    report: Report,
) -> None:
    """See to it that relays carry streams to us; announce and report the new ones (`relayed`)."""
    while True:
        try:
            if await directory.renew_relays(model_id):
                description.move_behind(directory.relays)
                announcer.hurry()
                report(PeerEvent("relayed", {"relays": [str(relay) for relay in directory.relays]}))
        except DirectoryError as error:
            _logger.warning("could not look for other relays: %s", error)
        await asyncio.sleep(_LOOK_SECONDS)
