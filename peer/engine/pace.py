"""How much one iteration may carry, so that those who decode hardly notice each other."""

from collections.abc import Collection

_IDLE_SECONDS = 0.03
"""How long an iteration may be when nobody decodes: a newcomer waits for one to open its session
and for another with its first tokens, at every peer."""

_LEAST_SHARED_SECONDS = 0.004
"""While somebody decodes, a prompt's part takes about as long as an iteration of tokens alone, so
that they come half as fast at worst; but so long at least, or switching would cost too much."""

_RECENT_SECONDS = 0.25
"""Somebody decodes as long as the last decoded token is not older than this."""

_PROMPT_SHARE = 0.5
"""The part of the time that prompts may take while somebody decodes."""

_SMOOTHING = 0.2


class Pace:
    """Measures iterations and sets the prompt budget of the next. Times are monotonic seconds.

    While others decode, prompts get small budgets, and after each a pause as long as it took:
    someone who decodes is away at other peers between two tokens, and would find this one busy
    every time he comes back.
    """

    def __init__(self, token_budget: int, least_tokens: int) -> None:
        self._token_budget = token_budget
        self._least_tokens = least_tokens
        self._decode_seconds = 0.0
        self._token_seconds = 0.0
        self._iteration_seconds = 0.0
        self._decoded_at: dict[tuple[str, str], float] = {}
        self._resume_at = float("-inf")

    @property
    def iteration_seconds(self) -> float:
        """How long recent iterations took; 0 before the first."""
        return self._iteration_seconds

    def is_shared(self, now: float) -> bool:
        """Return whether somebody decodes."""
        return bool(self._find_decoding(now))

    def note_decoding(self, now: float, holder: tuple[str, str] = ("", "")) -> None:
        """Note that a step of a holder that decodes has come in."""
        self._decoded_at.pop(holder, None)
        self._decoded_at[holder] = now

    def find_in_company(
        self, holders: Collection[tuple[str, str]], now: float
    ) -> set[tuple[str, str]]:
        """Return those of the holders beside whom others decode."""
        decoding = self._find_decoding(now)
        return {holder for holder in holders if decoding - {holder}}

    def choose_budget(self, now: float) -> int:
        """Return how many tokens of prompts the next iteration may carry."""
        if self.resume_in(now) > 0:
            return 0
        seconds = _IDLE_SECONDS
        if self.is_shared(now):
            seconds = min(seconds, max(_LEAST_SHARED_SECONDS, self._decode_seconds))
        if not self._token_seconds:
            return self._least_tokens
        num_tokens = int(seconds / self._token_seconds)
        return max(self._least_tokens, min(num_tokens, self._token_budget))

    def resume_in(self, now: float) -> float:
        """Return the seconds for which prompts have to wait, 0 when they need not."""
        return max(0.0, self._resume_at - now) if self.is_shared(now) else 0.0

    def _find_decoding(self, now: float) -> set[tuple[str, str]]:
        """Return who decodes, and forget who did so long ago: the first are the oldest."""
        for holder, decoded_at in list(self._decoded_at.items()):
            if now - decoded_at < _RECENT_SECONDS:
                break
            del self._decoded_at[holder]
        return set(self._decoded_at)

    def note(self, now: float, seconds: float, num_decoding: int, num_prompt_tokens: int) -> None:
        """Note an iteration that ended now: its length, and what it carried."""
        self._iteration_seconds = _smooth(self._iteration_seconds, seconds)
        if num_prompt_tokens == 0:
            self._decode_seconds = _smooth(self._decode_seconds, seconds)
            return
        if num_decoding == 0 or self._decode_seconds:
            rest = max(seconds - (self._decode_seconds if num_decoding else 0.0), 0.0)
            self._token_seconds = _smooth(self._token_seconds, rest / num_prompt_tokens)
        prompt_seconds = num_prompt_tokens * self._token_seconds
        self._resume_at = now + min(prompt_seconds, seconds) * (1 / _PROMPT_SHARE - 1)


def _smooth(average: float, value: float) -> float:
    return average + _SMOOTHING * (value - average) if average else value
