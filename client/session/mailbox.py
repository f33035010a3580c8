"""What the hops of one session have said, each on a stream of its own, and nobody has read yet."""

import asyncio
from collections import Counter
from dataclasses import dataclass

from ...protocol.errors import RemoteProtocolError, ShoalError, UnavailableError
from ...protocol.ids import SessionId
from ...protocol.messages.fields import Message
from ...protocol.messages.session import Declined, Gap, Output, Status
from ...protocol.net.dialling import make_refusal

_MAX_STATUSES = 8
"""Answers of one hop that are kept: nobody waits any more for those before."""


class GapError(UnavailableError):
    """A hop has not got what stands before a step."""


@dataclass(frozen=True)
class Arrived:
    """An output, and the size of the frame that brought it."""

    output: Output
    num_bytes: int


class Mailbox:
    """Filled by the links of a session, read by whoever waits for one of its hops."""

    def __init__(self) -> None:
        self._expected: set[tuple[SessionId, int]] = set()
        self._replays: dict[SessionId, Arrived | None] = {}
        self._outputs: dict[tuple[SessionId, int], Arrived] = {}
        self._statuses: dict[tuple[SessionId, int], Status] = {}
        self._num_asked: Counter[SessionId] = Counter()
        self._num_told: Counter[SessionId] = Counter()
        self._troubles: dict[SessionId, ShoalError] = {}
        self._news: asyncio.Event = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Mailbox: {len(self._outputs)} outputs, {len(self._troubles)} troubles>"

    def expect(self, session: SessionId, sequence: int) -> None:
        """Keep the output of a step when it comes; others are dropped."""
        self._expected.add((session, sequence))

    def newest_expected(self, session: SessionId) -> int:
        """Return the number of the newest step whose output is expected; 0 where there is none."""
        return max((number for known, number in self._expected if known == session), default=0)

    def expect_replay(self, session: SessionId) -> None:
        """Keep the newest output of a new hop until its replay is over: its length is not known."""
        self._replays[session] = None

    def end_replay(self, session: SessionId) -> None:
        """Drop what came of a replay: its end was all that counts."""
        self._replays.pop(session, None)

    def take_output(self, session: SessionId, sequence: int) -> Arrived | None:
        """Return the output of a step if it is here."""
        arrived = self._outputs.pop((session, sequence), None)
        if arrived is not None:
            self._expected.discard((session, sequence))
            return arrived
        newest = self._replays.get(session)
        return newest if newest is not None and newest.output.sequence >= sequence else None

    def expect_status(self, session: SessionId) -> int:
        """Note that a hop is asked how it is; return the number of that question."""
        self._num_asked[session] += 1
        return self._num_asked[session]

    def find_status(self, session: SessionId, number: int) -> Status | None:
        """Return what a hop answered to a question, once it has."""
        return self._statuses.pop((session, number), None)

    def trouble(self, session: SessionId) -> ShoalError | None:
        """Return what is wrong at a hop, the first that was heard of it."""
        return self._troubles.get(session)

    def forgive(self, *sessions: SessionId) -> None:
        """Forget what was wrong: it has been seen to."""
        for session in sessions:
            self._troubles.pop(session, None)

    def forget(self, session: SessionId) -> None:
        """Drop everything of a hop that is no longer part of the session."""
        self.forgive(session)
        self._replays.pop(session, None)
        for known in (self._num_asked, self._num_told):
            known.pop(session, None)
        self._statuses = {key: value for key, value in self._statuses.items() if key[0] != session}
        self._expected = {key for key in self._expected if key[0] != session}
        self._outputs = {key: value for key, value in self._outputs.items() if key[0] != session}

    def forget_steps(self) -> None:
        """Expect nothing more: the step under way is over."""
        self._expected.clear()
        self._outputs.clear()

    def put(self, session: SessionId, message: Message, num_bytes: int) -> None:
        """Take in what a hop has said."""
        if isinstance(message, Declined):
            self.put_trouble(session, make_refusal(message))
        elif isinstance(message, Gap) and message.session == session:
            self.put_trouble(session, GapError(f"the prefix ends at token {message.length}"))
        elif isinstance(message, Status) and message.session == session:
            self._num_told[session] += 1
            number = self._num_told[session]
            self._statuses[session, number] = message
            self._statuses.pop((session, number - _MAX_STATUSES), None)
        elif isinstance(message, Output) and message.session == session:
            key = session, message.sequence
            if key in self._expected:
                self._outputs[key] = Arrived(message, num_bytes)
            elif session in self._replays:
                self._replays[session] = Arrived(message, num_bytes)
        else:
            name = type(message).__name__
            self.put_trouble(session, RemoteProtocolError(f"a hop said {name} unasked"))
        self._news.set()

    def put_trouble(self, session: SessionId, error: ShoalError) -> None:
        """Note what is wrong at a hop; the first counts, the rest follows from it."""
        self._troubles.setdefault(session, error)
        self._news.set()

    async def wait(self) -> None:
        """Wait until there is something new since the last wait of anybody."""
        news = self._news
        await news.wait()
        if news is self._news:
            self._news = asyncio.Event()
