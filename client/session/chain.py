"""A segment of a route: hops of which each pushes to the next. Asked at its first, answered by its
last, and every hop of it says on a stream of its own what is wrong.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from ...protocol.errors import ErrorCode, RefusedError, ShoalError, SilentError, UnavailableError
from ...protocol.ids import SessionId
from ...protocol.messages.session import Admit, Mirror, Probe, Redirect, Status, Step
from ...protocol.net.clock import Clock
from ..routing.deadlines import FLOOR_SECONDS, WakefulTimeout
from .hop_link import HopLink
from .mailbox import Arrived, GapError, Mailbox

_QUESTIONABLE_CODES = frozenset({ErrorCode.BAD_VALUES, ErrorCode.BAD_FRAME})
"""What a hop may say of a step that another peer pushed: one of the two is wrong."""


_LATE_SECONDS = 0.1
"""By how much an answer may be later than a slow one before the hops are asked how far they are. It
costs a small frame each, and blames nobody: a hop then has `FLOOR_SECONDS` to answer."""


class ChainFault(Exception):
    """Why a segment does not answer: the hops that are lost, by index, or (`cut`) the link behind
    one of them, between two that live.
    """

    def __init__(self, lost: dict[int, ShoalError], cut: int | None = None) -> None:
        super().__init__(next((str(error) for error in lost.values()), f"link {cut} is cut"))
        self.lost = lost
        self.cut = cut


class Chain:
    """The links of one segment, in order, and what they have said. Made for one question."""

    def __init__(
        self, links: Sequence[HopLink], mailbox: Mailbox, clock: Clock, probe_seconds: float
    ) -> None:
        self._links = links
        self._mailbox = mailbox
        self._clock = clock
        self._probe_seconds = probe_seconds

    async def send(self, step: Step, timeout_seconds: float, carrying_seconds: float) -> int:
        """Hand a step to the first hop; return the bytes of its frame. Raises ChainFault."""
        self._mailbox.expect(self._links[-1].session, step.sequence)
        try:
            return await self._links[0].send(step, timeout_seconds, carrying_seconds)
        except UnavailableError as error:
            raise ChainFault({0: error}) from error

    async def receive(
        self,
        session: SessionId,
        sequence: int,
        timeout_seconds: float,
        carrying_seconds: float = 0.0,
    ) -> Arrived:
        """Return the output of a step that the session at the last hop answers with.

        When it is late, every hop is asked how far it is: one that lives says so at once, even
        while others need `carrying_seconds` more to push the step along. Raises ChainFault.
        """
        late_seconds = max(0.0, timeout_seconds - FLOOR_SECONDS) + _LATE_SECONDS
        with contextlib.suppress(TimeoutError):
            async with WakefulTimeout(late_seconds):
                return await self._hear(session, sequence)
        timeout_seconds += carrying_seconds
        rest_seconds = timeout_seconds - late_seconds
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(
                    self._watch(sequence, rest_seconds, timeout_seconds), name="watching a chain"
                )
                arrived = await self._hear(session, sequence)
                watching.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return arrived

    async def _hear(self, session: SessionId, sequence: int) -> Arrived:
        """Wait for an output. Raises ChainFault for what a hop says is wrong."""
        while (arrived := self._mailbox.take_output(session, sequence)) is None:
            await self._check_troubles()
            await self._mailbox.wait()
        return arrived

    async def _watch(self, sequence: int, rest_seconds: float, timeout_seconds: float) -> None:
        """Find out why an answer is late; raises ChainFault for whose fault that is.

        Who is silent is lost after the same time as in a star: whoever lives answers a probe at
        once, so it is sent before the deadline, when the answer is only a little late. A step that
        stands still at a hop that lives is the hop's fault once the deadline has passed.
        """
        everybody = range(len(self._links))
        await self.probe(everybody)
        await _wait_awake(rest_seconds)
        before: list[tuple[int, int]] | None = None
        while True:
            statuses = await self.probe(everybody)
            progress = [(status.sequence, status.done_sequence) for status in statuses]
            if before is None or progress == before:
                self._check_progress(sequence, statuses, timeout_seconds, is_first=before is None)
            before = progress
            await _wait_awake(timeout_seconds)

    async def probe(self, indices: Sequence[int]) -> list[Status]:
        """Return how far some hops are; raises ChainFault with those that say nothing."""
        statuses = await asyncio.gather(
            *(
                ask_status(link, self._mailbox, Probe(link.session, 0), self._probe_seconds)
                for link in (self._links[index] for index in indices)
            ),
            return_exceptions=True,
        )
        lost: dict[int, ShoalError] = {}
        found: list[Status] = []
        for index, status in zip(indices, statuses, strict=True):
            if isinstance(status, ShoalError):
                lost[index] = status
            elif isinstance(status, BaseException):
                raise status
            else:
                found.append(status)
        if lost:
            raise ChainFault(lost)
        return found

    async def _check_troubles(self) -> None:
        """Raise ChainFault for what any of the hops has said."""
        lost: dict[int, ShoalError] = {}
        cuts: list[int] = []
        last = len(self._links) - 1
        for index, link in enumerate(self._links):
            error = self._mailbox.trouble(link.session)
            if error is None:
                continue
            if _is_about_link_behind(error):
                if index < last:  # or else it pushes to a hop that is not asked here
                    cuts.append(index)
            elif index > 0 and _is_about_link_before(error):
                cuts.append(index - 1)
            elif isinstance(error, GapError):
                detail = f"{link.name} lost the prefix of the session"
                lost[index] = UnavailableError(detail)
            else:
                lost[index] = error
        if lost:
            raise ChainFault(lost)
        if cuts:
            await self.probe((cuts[0], cuts[0] + 1))
            raise ChainFault({}, cut=cuts[0])

    def _check_progress(
        self, sequence: int, statuses: Sequence[Status], timeout_seconds: float, is_first: bool
    ) -> None:
        """Raise ChainFault for the hop, or the link, at which a step stands still."""
        newest = max(sequence, self._mailbox.newest_expected(self._links[-1].session))
        for index, status in enumerate(statuses):
            if index > 0 and status.sequence > newest:
                raise ChainFault({}, cut=index - 1)  # it was pushed what nobody has sent
            if status.done_sequence >= sequence:
                continue
            if index > 0 and status.sequence < sequence:
                raise ChainFault({}, cut=index - 1)
            raise ChainFault({index: self._make_silence(index, timeout_seconds)})
        if not is_first:  # its answer may have been on its way
            last = len(self._links) - 1
            raise ChainFault({last: self._make_silence(last, timeout_seconds)})

    def _make_silence(self, index: int, timeout_seconds: float) -> SilentError:
        name = self._links[index].name
        return SilentError(f"{name} did not answer within {timeout_seconds:.1f} s")


async def ask_status(
    link: HopLink,
    mailbox: Mailbox,
    message: Probe | Admit | Redirect | Mirror,
    timeout_seconds: float,
) -> Status:
    """Say something to a hop that it answers at once.

    What was wrong with the links of the hop before is seen to by admitting or redirecting. Raises
    SilentError when it does not answer, or what else is wrong with it.
    """
    try:
        async with WakefulTimeout(timeout_seconds):
            await link.send(message, timeout_seconds)
            # Not before: what was never sent is never answered.
            number = mailbox.expect_status(link.session)
            while (status := mailbox.find_status(link.session, number)) is None:
                error = mailbox.trouble(link.session)
                if error is not None and not _is_about_links(error):
                    raise error
                await mailbox.wait()
    except TimeoutError as error:
        raise SilentError(f"{link.name} did not answer within {timeout_seconds:.1f} s") from error
    if isinstance(message, Admit | Redirect):
        mailbox.forgive(link.session)
    return status


async def _wait_awake(seconds: float) -> None:
    """Let time pass in which this process runs."""
    with contextlib.suppress(TimeoutError):
        async with WakefulTimeout(seconds):
            await asyncio.get_running_loop().create_future()


def choose_probe_seconds(rtt_seconds: float) -> float:
    """Return how long a peer that lives may take to say so, however busy it is."""
    return FLOOR_SECONDS + 2 * rtt_seconds


def _is_about_link_behind(error: ShoalError) -> bool:
    return isinstance(error, RefusedError) and error.code is ErrorCode.NEXT_UNREACHABLE


def _is_about_link_before(error: ShoalError) -> bool:
    if isinstance(error, GapError):
        return True
    return isinstance(error, RefusedError) and error.code in _QUESTIONABLE_CODES


def _is_about_links(error: ShoalError) -> bool:
    return _is_about_link_behind(error) or _is_about_link_before(error)
