"""The roll call: hosts are dialled before a move, so that made-up announcements move nobody."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from ...protocol.errors import NotDialledError, RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.ids import PeerId
from ...protocol.net.clock import AnswerTimeout, Clock
from ...protocol.net.dialling import check_welcome, dial, greet_peer
from ...protocol.net.retry import Backoff, Backoffs
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement, PeerState, draw_by_address
from ...protocol.spans import Span
from .supply import MIN_REPLICAS

_logger = logging.getLogger(__name__)

MAX_CALLED = 16
"""Hosts that are dialled before one move."""

_ANSWER_SECONDS = 5.0

_ABSENT = Backoff(60.0, 3600.0)
"""How long a host that did not answer counts for nothing. Else it would be dialled at each look."""


def choose_hosts(drawn: Iterable[Announcement], span: Span) -> list[Announcement]:
    """Return those to dial of the hosts of a span: of each block at first as many as it needs.

    They come in an order that nobody else can tell.
    """
    num_called = np.zeros(span.stop, dtype=int)
    needed: list[Announcement] = []
    others: list[Announcement] = []
    for host in drawn:
        blocks = slice(max(host.span.start, span.start), min(host.span.stop, span.stop))
        is_needed = bool((num_called[blocks] < MIN_REPLICAS).any())
        (needed if is_needed else others).append(host)
        num_called[blocks] += is_needed
    return (needed + others)[:MAX_CALLED]


class RollCall:
    """Dials hosts for one peer, and knows who was absent."""

    def __init__(self, transport: Transport, clock: Clock, rng: random.Random) -> None:
        self._transport = transport
        self._clock = clock
        self._rng = rng
        self._absent = Backoffs[PeerId](_ABSENT, clock)

    @property
    def absent(self) -> frozenset[PeerId]:
        """The hosts that did not answer lately, or served something else."""
        self._absent.forget_expired()
        return self._absent.resting

    async def call(self, hosts: Sequence[Announcement], span: Span) -> Collection[PeerId]:
        """Dial hosts of a span; return all that cannot be counted on there.

        If one that was dialled does not answer, those that were not dialled do not count either.
        Of those at one address only one may be there: it is drawn, and the others do not count.
        Hosts behind relays cannot be dialled from here: so they never count, and are not absent.
        """
        able = sorted((host for host in hosts if host.endpoints), key=lambda host: host.peer_id)
        drawn = list(draw_by_address(able, self._rng))
        called = choose_hosts(drawn, span)
        answers = await asyncio.gather(*map(self._is_there, called))
        there = [host for host, is_there in zip(called, answers, strict=True) if is_there]
        counted = drawn if all(answers) else there
        return {host.peer_id for host in hosts} - {host.peer_id for host in counted}

    async def _is_there(self, host: Announcement) -> bool:
        """Return whether a host answers, and serves what it announced or is about to."""
        peer_id, name = host.peer_id, f"peer …{host.peer_id[-6:]}"
        try:
            async with AnswerTimeout(_ANSWER_SECONDS, f"{name} did not answer in time"):
                stream = await dial(
                    self._transport, self._clock, peer_id, host.endpoints, _ANSWER_SECONDS
                )
                welcome, _ = await greet_peer(stream, peer_id, self._clock)
            await stream.close()
            if host.state is PeerState.ONLINE:
                check_welcome(welcome, peer_id, host.span, host.model_id)
        except RefusedError:
            pass  # it has no time for us, or loads its blocks
        except (UnavailableError, RemoteProtocolError) as error:
            _logger.info("%s does not count as a host of blocks %s: %s", name, host.span, error)
            if not isinstance(error, NotDialledError):
                self._absent.note_failure(peer_id)
            return False
        self._absent.note_success(peer_id)
        return True
