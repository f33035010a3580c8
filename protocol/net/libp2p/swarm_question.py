# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""Asks the peers that one joins through which swarm they belong to, and answers that question.

Without it a newcomer with an old code would join the DHT, find nobody, and wait.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from ...errors import (
    DirectoryError,
    ErrorCode,
    NobodyAnswersError,
    RefusedError,
    RemoteProtocolError,
    UnavailableError,
    WrongSwarmError,
)
from ...fair_share import BUSY_SECONDS, RecentCosts
from ...ids import PeerId
from ...membership.membership import GREETING_NONCE_BYTES, Membership, read_public_greeting
from .hivemind_packages import importing_hivemind
from .multiaddrs import PeerAddress

with importing_hivemind():
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

QUESTION = "shoal.swarm.1"
"""The name of the libp2p protocol that carries a nonce there and an answer back."""

_ANSWER_SECONDS = 1.5

_MOST_QUESTIONS, _CERTAIN_QUESTIONS = 2000, 10
"""Of all strangers in ten seconds, and of each whatever others ask: whoever joins asks once."""

Ask = Callable[[PeerId, bytes], Awaitable[bytes]]
"""Sends a nonce to a peer and returns its answer; raises UnavailableError when there is none."""


def answer(membership: Membership, peer_id: PeerId, nonce: bytes) -> bytes:
    """Return what a peer says when asked; raises RemoteProtocolError for a malformed question."""
    if len(nonce) != GREETING_NONCE_BYTES:
        raise RemoteProtocolError("the question for a swarm is malformed")
    return membership.answer_greeting(nonce, peer_id)


async def find_swarm(
    peers: Sequence[PeerAddress], membership: Membership | None, ask: Ask
) -> tuple[Membership, list[PeerAddress]]:
    """Return the swarm to join and the peers to join it through: first those that have answered.

    With a membership, peers of other swarms are left out. Without any, the swarm is the public one
    that the peers belong to. Raises WrongSwarmError when that cannot be, DirectoryError
    when nobody answers.
    """
    nonce = secrets.token_bytes(GREETING_NONCE_BYTES)
    answers = await asyncio.gather(*(_ask(ask, peer, nonce) for peer in peers))
    heard = [(peer, said) for peer, said in zip(peers, answers, strict=True) if said is not None]
    if not heard:
        raise make_silence_error(peers)
    silent = [peer for peer, said in zip(peers, answers, strict=True) if said is None]
    peers = [*(peer for peer, _ in heard), *silent]
    if membership is None:
        return _learn_swarm(heard, nonce), peers
    wrong = [
        peer for peer, said in heard if not membership.is_same_swarm(said, nonce, peer.peer_id)
    ]
    if len(wrong) == len(heard):
        reason = "wrong secret" if membership.is_private else "wrong swarm"
        raise WrongSwarmError(
            f"{reason}: {_list(wrong)} does not belong to the swarm of this join code; ask for a "
            "new code"
        )
    return membership, [peer for peer in peers if peer not in wrong]


def make_silence_error(peers: Sequence[PeerAddress]) -> DirectoryError:
    """Return what to raise when peers take connections and say nothing."""
    return NobodyAnswersError(
        f"no initial peer answers: {_list(peers)}; it may be paused or overloaded: give another "
        "address, or restart the peer"
    )


def make_ask(p2p: P2P) -> Ask:
    """Return what asks a peer, which p2pd is connected to, for its swarm."""

    async def ask(peer_id: PeerId, nonce: bytes) -> bytes:
        target = PeerID.from_base58(peer_id)
        try:
            return await cast(Any, p2p)._client.call_unary_handler(target, QUESTION, nonce)
        except (P2PDaemonError, P2PHandlerError, OSError) as error:
            raise UnavailableError(f"{peer_id} does not say its swarm: {error}") from error

    return ask


async def answer_questions(p2p: P2P, membership: Membership) -> None:
    """Answer from now on which swarm we are in."""
    peer_id = PeerId(cast(Any, p2p).peer_id.to_base58())
    budget = RecentCosts(_MOST_QUESTIONS, 10.0, _CERTAIN_QUESTIONS)

    async def handle(nonce: bytes, sender: PeerID) -> bytes:
        if not budget.take(str(sender), 1, asyncio.get_running_loop().time()):
            raise RefusedError(ErrorCode.BUSY, "you ask too often", BUSY_SECONDS)
        return answer(membership, peer_id, nonce)

    await cast(Any, p2p)._client.add_unary_handler(QUESTION, handle)


def _learn_swarm(heard: Sequence[tuple[PeerAddress, bytes]], nonce: bytes) -> Membership:
    found: set[Membership] = set()
    for peer, said in heard:
        try:
            membership = read_public_greeting(said, nonce, peer.peer_id)
        except RemoteProtocolError as error:
            raise DirectoryError(
                f"{peer.text} does not say which swarm it is in: {error}"
            ) from error
        if membership is None:
            raise WrongSwarmError(
                f"not a member: {peer.text} belongs to a private swarm; ask its owner for a join "
                "code (--join)"
            )
        found.add(membership)
    if len(found) > 1:
        raise WrongSwarmError(
            "the addresses belong to different swarms; give addresses of one swarm"
        )
    return found.pop()


async def _ask(ask: Ask, peer: PeerAddress, nonce: bytes) -> bytes | None:
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await ask(peer.peer_id, nonce)
    except (UnavailableError, TimeoutError):
        return None


def _list(peers: Sequence[PeerAddress]) -> str:
    return ", ".join(peer.text for peer in peers)
