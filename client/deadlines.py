"""How long to wait for a peer's answer: from what it announced and what was measured since."""

from collections import deque
from dataclasses import dataclass, field

FLOOR_SECONDS = 1.0
"""Below this a busy machine looks dead: schedulers and garbage collectors pause that long."""

_PATIENCE = 6.0
"""How many times slower than its worst recent answer a healthy peer may be."""

_MAX_SILENCES = 4

_UNKNOWN_SECONDS = 4.0
"""First deadline for a peer that neither announced a speed nor answered yet."""


@dataclass
class AnswerTimes:
    """Recent answer times of one peer, apart for single tokens and for prompts (per token)."""

    decode_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    prefill_seconds_per_token: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    num_silences: int = 0

    def note_silence(self) -> None:
        """Note that a deadline passed: if the peer is only slow, the next one is twice as long."""
        self.num_silences = min(self.num_silences + 1, _MAX_SILENCES)

    def note(self, num_tokens: int, seconds: float) -> None:
        """Note that a step of so many tokens (rows times length) was answered."""
        self.num_silences = 0
        if num_tokens == 1:
            self.decode_seconds.append(seconds)
        else:
            self.prefill_seconds_per_token.append(seconds / num_tokens)

    def choose_timeout_seconds(
        self,
        num_tokens: int,
        announced_decode_seconds: float | None,
        announced_prefill_seconds_per_token: float | None,
    ) -> float:
        """Return how long the answer to a step of `num_tokens` may take.

        >>> times = AnswerTimes()
        >>> times.note(1, 0.5)
        >>> times.choose_timeout_seconds(1, None, None)
        4.0
        """
        decode = max(self.decode_seconds, default=announced_decode_seconds)
        per_token = max(self.prefill_seconds_per_token, default=announced_prefill_seconds_per_token)
        if decode is None:
            # Every step reads all weights once; how long that takes is not known yet.
            expected = num_tokens * (per_token or 0.0)
            seconds = max(_UNKNOWN_SECONDS, FLOOR_SECONDS + _PATIENCE * expected)
        elif num_tokens == 1:
            seconds = FLOOR_SECONDS + _PATIENCE * decode
        else:
            # A few rows take about one decode step, however small a token's share of a prompt is.
            share = decode if per_token is None else per_token
            seconds = FLOOR_SECONDS + _PATIENCE * max(num_tokens * share, decode)
        return seconds * 2**self.num_silences
