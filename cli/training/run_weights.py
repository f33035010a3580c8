"""Fetches the weights of a run that goes on or is over, as one that is no member of it."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ...peer.engine.training.span_state import StateLayout
from ...peer.runs.questions import MemberAnswer, Members, make_question_id
from ...peer.runs.remote_members import RemoteMembers
from ...peer.runs.run_decisions import read_newest, read_run_commit
from ...peer.runs.state_transfer import Note, fetch_weights, list_layouts
from ...peer.streams.stream_host import ServiceCounts
from ...protocol.errors import RemoteProtocolError, UnavailableError
from ...protocol.identity import Identity
from ...protocol.ids import MemberId
from ...protocol.messages.runs import RunJoin
from ...protocol.net.clock import Clock
from ...protocol.net.network import Addresses, Network, Presence
from ...protocol.runs.decisions import Decision
from ...protocol.runs.run_record import RunRecord
from ...protocol.runs.training_run import TrainingRun

_TRIES = 3
"""How often one update is asked for; a later one is another matter."""

_MOST_TRIES = 10
"""How often in all: the next update may be over as well before it is asked for."""

_PAUSE_SECONDS = 1.0
_GRACE_SECONDS = 1.0
"""How long others are waited for once a peer has told its newest decision."""


@dataclass(frozen=True)
class RunWeights:
    """The weights of a run as they were after an update."""

    update: int
    loss: float
    """Of the update, in nats per token."""
    held_out_loss: float | None
    """After the update, where it is measured."""
    weights: Mapping[str, Tensor]
    """By their names in a checkpoint."""
    digest: str
    architecture: str
    """The name of the model's class in transformers."""


@asynccontextmanager
async def visit_swarm(network: Network, identity: Identity) -> AsyncGenerator[Presence]:
    """Join a swarm for a while, as one that serves nothing. Raises DirectoryError."""
    transport, directory = await network.connect()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(directory.close)
        stack.push_async_callback(transport.close)
        addresses = Addresses((), {})  # nobody can ask us anything
        yield Presence(identity, transport, directory, (), addresses, stack)


async def fetch_run_weights(
    record: RunRecord,
    presence: Presence,
    clock: Clock,
    note: Note,
    silence_seconds: float = 10.0,
) -> RunWeights:
    """Return the weights of the newest committed update, as one that is no member of the run.

    An update may be over before all its weights are asked for; then the next one is. Raises
    RefusedError or UnavailableError.
    """
    layouts, architecture = await asyncio.to_thread(list_layouts, record.run)
    own = MemberId(f"{presence.identity.peer_id}/{secrets.token_hex(8)}")
    members = RemoteMembers(own, record, presence, clock, silence_seconds, ServiceCounts())
    try:
        newest = partial(_ask_newest, members, own, record.run, len(layouts), clock)
        return await fetch_newest_weights(members, newest, layouts, architecture, note)
    finally:
        await members.close()


async def fetch_newest_weights(
    members: Members,
    ask_newest: Callable[[], Awaitable[Sequence[Decision]]],
    layouts: Sequence[StateLayout],
    architecture: str,
    note: Note,
) -> RunWeights:
    """Return the weights of the newest update; `ask_newest` asks peers for their newest decision.

    Raises RefusedError or UnavailableError.
    """
    tries = Counter[int | None]()
    while True:
        update: int | None = None
        decision = choose_decision(await ask_newest())
        try:
            if decision is None:
                raise UnavailableError("the peers do not agree on how far the run has come")
            commit = read_run_commit(decision, len(layouts))
            update, stages = commit.update, list[list[MemberId]]()
            for stage in range(len(layouts)):
                stages.append([member.id for member in decision.members if member.stage == stage])
            weights, digest = await fetch_weights(members, stages, update, layouts, note)
        except UnavailableError as error:
            tries[update] += 1
            if tries[update] == _TRIES or tries.total() == _MOST_TRIES:
                raise
            note(f"{error}: the peers are asked again for the newest update")
            await asyncio.sleep(_PAUSE_SECONDS)
        else:
            return RunWeights(
                update, commit.loss, commit.held_out_loss, weights, digest, architecture
            )


def choose_decision(told: Sequence[Decision]) -> Decision | None:
    """Return the decision that more than half of the answers tell; None: there is none."""
    decision, count = Counter(told).most_common(1)[0]
    return decision if 2 * count > len(told) else None


async def _ask_newest(
    members: RemoteMembers, own: MemberId, run: TrainingRun, num_stages: int, clock: Clock
) -> list[Decision]:
    """Return the newest decisions of the peers that answer soon."""
    decisions: list[Decision] = []
    deadline = math.inf

    def take(answer: MemberAnswer) -> None:
        nonlocal deadline
        newest = read_newest(answer)
        if read_run_commit(newest, num_stages).update > run.num_updates:
            raise RemoteProtocolError("a peer tells an update that the run does not have")
        decisions.append(newest)
        deadline = min(deadline, clock.now() + _GRACE_SECONDS)

    peers = await members.list_peers()
    question = RunJoin(make_question_id(), own, b"")
    failures = await members.ask_peers(peers, question, take, lambda: clock.now() >= deadline)
    if not decisions:
        why = "; ".join(dict.fromkeys(map(str, failures))) or "nobody announces it"
        raise UnavailableError(f"no peer tells how far the run has come: {why}")
    return decisions
