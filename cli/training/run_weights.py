"""Fetches the weights of a run that goes on or is over, as one that is no member of it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from torch import Tensor

from ...peer.engine.training.span_state import StateLayout
from ...peer.runs.questions import MemberAnswer, make_question_id
from ...peer.runs.remote_members import RemoteMembers
from ...peer.runs.run_decisions import read_run_commit
from ...peer.runs.state_transfer import Note, fetch_weights, list_layouts
from ...protocol.errors import RemoteProtocolError, UnavailableError
from ...protocol.identity import Identity
from ...protocol.ids import MemberId
from ...protocol.messages.runs import RunJoin, Vote
from ...protocol.net.clock import Clock
from ...protocol.net.network import Addresses, Network, Presence
from ...protocol.runs.decisions import Decision
from ...protocol.runs.run_record import RunRecord

_logger = logging.getLogger(__name__)

_TRIES = 3
"""How often one update is asked for; a later one is another matter."""

_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class RunWeights:
    """The weights of a run as they were after an update."""

    update: int
    loss: float
    """Of the update, in nats per token."""
    weights: Mapping[str, Tensor]
    """By their names in a checkpoint."""
    digest: str
    architecture: str
    """The name of the model's class in transformers."""


async def fetch_run_weights(
    record: RunRecord,
    identity: Identity,
    network: Network,
    clock: Clock,
    note: Note,
    silence_seconds: float = 10.0,
) -> RunWeights:
    """Return the weights of the newest committed update, as one that is no member of the run.

    An update may be over before all its weights are asked for; then the next one is. Raises
    RefusedError or UnavailableError.
    """
    layouts, architecture = await asyncio.to_thread(list_layouts, record.run)
    own = MemberId(f"{identity.peer_id}/{secrets.token_hex(8)}")
    transport, directory = await network.connect()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(directory.close)
        stack.push_async_callback(transport.close)
        addresses = Addresses((), {})  # nobody can ask us anything
        presence = Presence(identity, transport, directory, (), addresses, stack)
        members = RemoteMembers(own, record, presence, clock, silence_seconds)
        stack.push_async_callback(members.close)
        return await _fetch(members, own, layouts, architecture, note)


async def _fetch(
    members: RemoteMembers,
    own: MemberId,
    layouts: Sequence[StateLayout],
    architecture: str,
    note: Note,
) -> RunWeights:
    tries = Counter[int]()
    while True:
        decision = await _fetch_newest(members, own)
        commit = read_run_commit(decision, len(layouts))
        update, stages = commit.update, list[list[MemberId]]()
        for stage in range(len(layouts)):
            stages.append([member.id for member in decision.members if member.stage == stage])
        try:
            weights, digest = await fetch_weights(members, stages, update, layouts, note)
        except UnavailableError as error:
            _logger.info("%s", error)
            tries[update] += 1
            if tries[update] == _TRIES:
                raise
            await asyncio.sleep(_PAUSE_SECONDS)
        else:
            return RunWeights(update, commit.loss, weights, digest, architecture)


async def _fetch_newest(members: RemoteMembers, own: MemberId) -> Decision:
    """Return the newest decision that any peer of the run tells."""
    decisions: list[Decision] = []

    def take(answer: MemberAnswer) -> None:
        decided = answer.check_kind(Vote).decided
        if decided is None:
            raise RemoteProtocolError("a peer did not answer with its newest decision")
        decisions.append(decided.decision)

    peers = await members.list_peers()
    failures = await members.ask_peers(peers, RunJoin(make_question_id(), own, b""), take)
    if not decisions:
        why = "; ".join(dict.fromkeys(map(str, failures))) or "nobody announces it"
        raise UnavailableError(f"no peer tells how far the run has come: {why}")
    return max(decisions, key=lambda decision: decision.number)
