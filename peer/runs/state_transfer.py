"""State that leaves a stage: all of it for a mate, the weights alone for one that exports them.

A member is asked for the state before a named update, so that stages fit each other. Of those that
hold a stage, the digest that most of them tell counts, and what one hands over has to have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

from torch import Tensor

from ...models.shells.shell_opening import open_shell
from ...protocol.errors import ErrorCode, RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.ids import MemberId
from ...protocol.messages.runs import StateFetch, StateFollows, StatePart
from ...protocol.runs.training_run import TrainingRun
from ...protocol.runs.update_parts import find_difference
from ..engine.training.span_building import list_weights
from ..engine.training.span_state import (
    MOST_STATE_COPIES,
    MOST_WEIGHT_COPIES,
    StateDigest,
    StateLayout,
    digest_tensors,
    pick_weights,
)
from ..engine.training.trainable_span import TrainableSpan
from .questions import (
    FAILURES,
    MemberAnswer,
    Members,
    NoteBytes,
    ignore_bytes,
    make_busy,
    make_question_id,
)
from .run_resources import Compute

_GRACE_SECONDS = 1.0
"""How long other holders are waited for once one has told its digest."""

_MOST_COPIES = {StatePart.ALL: MOST_STATE_COPIES, StatePart.WEIGHTS: MOST_WEIGHT_COPIES}

Note = Callable[[str], None]
"""Takes warnings of what goes wrong meanwhile."""


@dataclass(frozen=True)
class FetchedState:
    """The state of a stage before an update, or its weights, as a holder has sent it."""

    update: int
    tensors: Mapping[str, Tensor]
    digest: StateDigest


class StateCopies:
    """Copies of the state of a stage that are being sent.

    All that fetch the same get the same copy, which ends with the last of them. Each kind has its
    own limit, so that strangers, who get weights alone, take no memory from mates that join.
    """

    def __init__(self, span: TrainableSpan, compute: Compute) -> None:
        self._span = span
        self._compute = compute
        self._turns = {part: asyncio.Lock() for part in StatePart}
        self._copies = WeakValueDictionary[tuple[StatePart, int], memoryview]()

    async def read(self, part: StatePart, update: int) -> memoryview:
        """Return a copy of the state before an update, which is under way.

        Raises RefusedError where it is over, or where copies of others are still being sent.
        """
        async with self._turns[part]:
            copy = self._copies.get((part, update))
            if copy is None:
                if sum(kind is part for kind, _ in self._copies) >= _MOST_COPIES[part]:
                    raise make_busy("this member still sends the state of another update")
                copy = await self._compute(partial(self._make, part, update))
                self._copies[part, update] = copy
            return copy

    def _make(self, part: StatePart, update: int) -> memoryview:
        if self._span.update != update:
            raise RefusedError(ErrorCode.BAD_VALUES, f"update {update} is over")
        state = self._span.read_state()
        if part is StatePart.WEIGHTS:
            state = pick_weights(state)
        return StateLayout(state).pack(state)


async def fetch_state(
    members: Members,
    holders: Sequence[MemberId],
    update: int,
    part: StatePart,
    layout: StateLayout,
    compute: Compute,
    note: Note,
    note_bytes: NoteBytes = ignore_bytes,
    rng: random.Random | None = None,
) -> FetchedState:
    """Return the state of a stage before an update, or its weights, from one of its holders.

    Of digests that equally many holders tell, that of the first one counts. `rng` draws who hands
    over what has it; None: in the order of the holders. Raises UnavailableError where none does.
    """

    async def ask(holder: MemberId, part: StatePart, num_bytes: int) -> MemberAnswer:
        question = StateFetch(make_question_id(), update, part)
        return await members.ask(holder, question, most_bytes=num_bytes, note_bytes=note_bytes)

    failures: list[str] = []
    digests: dict[MemberId, bytes] = {}

    async def ask_digest(holder: MemberId, grace: asyncio.Timeout) -> None:
        try:
            answer = await ask(holder, StatePart.DIGEST, 0)
            digests[holder] = answer.check_kind(StateFollows).digest
        except FAILURES as error:
            failures.append(str(error))
        else:
            if grace.when() is None:  # the others may be silent, or not have the state either
                grace.reschedule(asyncio.get_running_loop().time() + _GRACE_SECONDS)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as grace:
            await asyncio.gather(*(ask_digest(holder, grace) for holder in holders))
    told = {holder: digests[holder] for holder in holders if holder in digests}
    difference = find_difference(told)
    if difference.others:
        note(f"before update {update}, {difference.describe('states')}")
    trusted = list(difference.equal)
    if rng is not None:
        rng.shuffle(trusted)
    for holder in trusted:
        try:
            answer = await ask(holder, part, layout.num_bytes)
            follows = answer.check_kind(StateFollows)
            read = partial(_read, layout, part, follows, answer.payload)
            tensors, digest = await compute(read)
        except FAILURES as error:
            failures.append(str(error))
            continue
        if digest.whole == told[holder]:
            return FetchedState(update, tensors, digest)
        failures.append(f"member {holder} sent other numbers than its digest tells")
        note(f"{failures[-1]}: another one is asked")
    why = "; ".join(dict.fromkeys(failures)) or "it has no peer"
    raise UnavailableError(why)


def _read(
    layout: StateLayout, part: StatePart, follows: StateFollows, payload: bytes | memoryview
) -> tuple[dict[str, Tensor], StateDigest]:
    """Return what was sent, and its digest. Raises RemoteProtocolError for another size."""
    try:
        tensors = layout.unpack(memoryview(payload))
    except ValueError as error:
        raise RemoteProtocolError(f"this is no state of the stage: {error}") from None
    if part is StatePart.ALL:
        return tensors, StateDigest.of(tensors)
    return tensors, StateDigest(bytes.fromhex(digest_tensors(tensors)), follows.rest)


def list_layouts(run: TrainingRun) -> tuple[list[StateLayout], str]:
    """Return how the weights of each stage are sent, and the name of the model's class."""
    shell = open_shell(run.model)
    spans = run.list_stages(len(shell.layers))
    layouts = [StateLayout(list_weights(shell, span)) for span in spans]
    return layouts, type(shell.model).__name__


async def fetch_weights(
    members: Members,
    stages: Sequence[Sequence[MemberId]],
    update: int,
    layouts: Sequence[StateLayout],
    note: Note,
) -> tuple[dict[str, Tensor], str]:
    """Return the weights of all stages before an update, by their names in a checkpoint, and their
    digest.

    All stages are asked at once, as each hands over a copy, and goes on. Raises UnavailableError
    where no member of a stage hands them over.
    """

    async def fetch(stage: int) -> Mapping[str, Tensor]:
        try:
            fetched = await fetch_state(
                members, stages[stage], update, StatePart.WEIGHTS, layouts[stage],
                asyncio.to_thread, note,
            )  # fmt: skip
        except UnavailableError as error:
            raise UnavailableError(
                f"no peer hands over the weights of stage {stage} after update {update}: {error}"
            ) from None
        return fetched.tensors

    try:
        async with asyncio.TaskGroup() as tasks:
            fetching = [tasks.create_task(fetch(stage)) for stage in range(len(layouts))]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    weights = {name: one for task in fetching for name, one in task.result().items()}
    return weights, await asyncio.to_thread(digest_tensors, weights)
