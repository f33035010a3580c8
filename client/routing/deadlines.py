"""How long to wait for a peer's answer: from what it announced and what was measured since."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from types import TracebackType

FLOOR_SECONDS = 1.0
"""Below this a busy machine looks dead: schedulers and garbage collectors pause that long."""

_PATIENCE = 6.0
"""How many times slower than its worst recent answer a healthy peer may be."""

_MAX_SILENCES = 4

_UNKNOWN_SECONDS = 4.0
"""First deadline for a peer that neither announced a speed nor answered yet."""

_LONGEST_ON_TRUST_SECONDS = 30.0
"""A peer that announced to be slow gets no more than this until it has shown it: it may lie."""

_SLOWEST_OF_ALL = 4.0
"""How many times slower than what is usual among other peers a peer may be at ease: beyond half a
minute it gets no more than that."""

_FEW_TOKENS = 16
"""Steps of up to so many tokens cost about as much as one: the weights are read once."""


@dataclass
class AnswerTimes:
    """Recent answer times of one peer, apart for few tokens and for prompts (per token).

    `block_seconds` are those for few tokens without the way there and back, per block.
    """

    decode_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    prefill_seconds_per_token: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    block_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    num_silences: int = 0

    @property
    def has_answered(self) -> bool:
        """Return whether the peer has ever taken a step."""
        return bool(self.decode_seconds or self.prefill_seconds_per_token)

    def note_silence(self) -> None:
        """Note that a deadline passed: if the peer is only slow, the next one is twice as long."""
        self.num_silences = min(self.num_silences + 1, _MAX_SILENCES)

    def note(
        self, num_tokens: int, seconds: float, rtt_seconds: float = 0.0, num_blocks: int = 1
    ) -> None:
        """Note that a step of so many tokens (rows times length) was answered."""
        self.num_silences = 0
        if num_tokens <= _FEW_TOKENS:
            self.decode_seconds.append(seconds)
            self.block_seconds.append(max(0.0, seconds - rtt_seconds) / num_blocks)
        else:
            self.prefill_seconds_per_token.append(seconds / num_tokens)

    def choose_timeout_seconds(
        self,
        num_tokens: int,
        announced_decode_seconds: float | None,
        announced_prefill_seconds_per_token: float | None,
        announced_queue_seconds: float = 0.0,
        others: Iterable["AnswerTimes"] = (),
    ) -> float:
        """Return how long the answer to a step of `num_tokens` may take.

        What `others` took tells how much slowness is plausible.

        >>> times = AnswerTimes()
        >>> times.note(1, 0.5)
        >>> times.choose_timeout_seconds(1, None, None)
        4.0
        """
        shown = FLOOR_SECONDS + _PATIENCE * self._expect_seconds(num_tokens, max)
        told = self._trust_seconds(
            num_tokens,
            announced_decode_seconds,
            announced_prefill_seconds_per_token,
            announced_queue_seconds,
        )
        seconds = max(shown, told)
        if seconds > _LONGEST_ON_TRUST_SECONDS:
            seconds = min(seconds, self._find_ceiling_seconds(num_tokens, others))
        return seconds * 2**self.num_silences

    def _trust_seconds(
        self,
        num_tokens: int,
        announced_decode_seconds: float | None,
        announced_prefill_seconds_per_token: float | None,
        announced_queue_seconds: float,
    ) -> float:
        """Return how long to wait where an announcement stands in for what was not measured."""
        decode = max(self.decode_seconds, default=announced_decode_seconds)
        per_token = max(self.prefill_seconds_per_token, default=announced_prefill_seconds_per_token)
        expected = decode or 0.0
        if num_tokens > _FEW_TOKENS:
            share = decode or 0.0 if per_token is None else per_token
            expected = max(num_tokens * share, expected)
        seconds = FLOOR_SECONDS + _PATIENCE * expected
        if decode is None:
            seconds = max(_UNKNOWN_SECONDS, seconds)
        if not (
            self.decode_seconds if num_tokens <= _FEW_TOKENS else self.prefill_seconds_per_token
        ):
            seconds += announced_queue_seconds  # what was measured has waited there as well
        return min(seconds, _LONGEST_ON_TRUST_SECONDS)

    def _expect_seconds(self, num_tokens: int, choose: Callable[[Sequence[float]], float]) -> float:
        """Return what `choose` makes of the measured times; 0 where nothing was measured."""
        expected = choose(self.decode_seconds) if self.decode_seconds else 0.0
        if num_tokens > _FEW_TOKENS and self.prefill_seconds_per_token:
            expected = max(num_tokens * choose(self.prefill_seconds_per_token), expected)
        return expected

    def _find_ceiling_seconds(self, num_tokens: int, others: Iterable["AnswerTimes"]) -> float:
        """Return what no slow answer extends the deadline beyond.

        From the worst answer alone, a peer that stalls would get six times as long every time.
        """
        ceilings = [FLOOR_SECONDS + _PATIENCE * self._expect_seconds(num_tokens, median_low)]
        usual = [other._expect_seconds(num_tokens, median_low) for other in others]
        if known := [seconds for seconds in usual if seconds > 0]:
            ceilings.append(FLOOR_SECONDS + _PATIENCE * _SLOWEST_OF_ALL * median_low(known))
        return max(_LONGEST_ON_TRUST_SECONDS, min(ceilings))


_STANDSTILL_SECONDS = 0.5
"""A timer that comes so much too late says that this process stood still: it was stopped (Ctrl-Z),
or the machine slept. The answer may have come meanwhile, and nobody has looked."""


class WakefulTimeout:
    """A timeout for use in an `async with`; time in which this process stood still does not count.

    Like `asyncio.timeout`, it raises TimeoutError. When it finds that it comes far too late, it
    begins anew: whoever is waited for has had no chance to be heard.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> "WakefulTimeout":
        await self._timeout.__aenter__()
        self.restart(self._seconds)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        assert self._timer is not None
        self._timer.cancel()
        return await self._timeout.__aexit__(kind, error, trace)

    def restart(self, seconds: float) -> None:
        """Count so many seconds from now."""
        if self._timer is not None:
            self._timer.cancel()
        self._seconds = seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._end)

    def _end(self) -> None:
        assert self._timer is not None
        now = asyncio.get_running_loop().time()
        if now - self._timer.when() > _STANDSTILL_SECONDS:
            self.restart(self._seconds)
        else:
            self._timeout.reschedule(now)


_LONGEST_STEP_TOKENS = 2048
"""A step that a peer may be computing when somebody else knocks."""


def choose_open_timeout_seconds(
    announced_queue_seconds: float,
    announced_prefill_seconds_per_token: float | None,
    longest_seconds: float,
) -> float:
    """Return how long a peer may take to accept a connection and open a session.

    It answers between two steps, its own or those of others, the longest of them a prompt.

    >>> choose_open_timeout_seconds(0.2, 0.0005, 5.0)
    2.224
    >>> choose_open_timeout_seconds(0.0, None, 5.0)
    5.0
    """
    if announced_prefill_seconds_per_token is None:
        return longest_seconds
    prompt_seconds = _LONGEST_STEP_TOKENS * announced_prefill_seconds_per_token
    return min(FLOOR_SECONDS + announced_queue_seconds + prompt_seconds, longest_seconds)
