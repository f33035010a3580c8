"""How much one iteration may carry, so that those who decode hardly notice each other."""

from collections.abc import Collection

_IDLE_SECONDS = 0.03
"""How long an iteration may be when nobody decodes: a newcomer waits for one to open its session
and for another with its first tokens, at every peer."""

_BLOCK_SECONDS = 0.002
"""While somebody decodes, how long a block may take for what fills the time: a step that is urgent
waits until it is done."""

_RECENT_SECONDS = 0.25
"""Somebody decodes as long as the last decoded token is not older than this."""

_SMOOTHING = 0.2


class _Recent:
    """Who did something within the last moments."""

    def __init__(self) -> None:
        self._seen_at: dict[tuple[str, str], float] = {}

    def note(self, now: float, holder: tuple[str, str]) -> None:
        self._seen_at.pop(holder, None)
        self._seen_at[holder] = now

    def find(self, now: float) -> set[tuple[str, str]]:
        """Return who it was, and forget who did it long ago: the first are the oldest."""
        for holder, seen_at in list(self._seen_at.items()):
            if now - seen_at < _RECENT_SECONDS:
                break
            del self._seen_at[holder]
        return set(self._seen_at)


class Pace:
    """Measures iterations, and says how much of the next one others may fill, and for how long.

    Times are monotonic seconds. What is urgent interrupts what fills, between two blocks. Yet after
    it has taken some time, filling gets as much before it has to give way again: so those who
    decode come half as fast at worst, and prompts as well.
    """

    def __init__(self, token_budget: int, least_tokens: int, num_blocks: int) -> None:
        self._token_budget = token_budget
        self._least_tokens = least_tokens
        self._shared_seconds = min(_IDLE_SECONDS, num_blocks * _BLOCK_SECONDS)
        self._decode_seconds = 0.0
        self._token_seconds = 0.0
        self._iteration_seconds = 0.0
        self._decoding = _Recent()
        self._decoding_singly = _Recent()
        self._owed_seconds = 0.0
        self._filling_since = 0.0

    @property
    def iteration_seconds(self) -> float:
        """How long recent iterations took; 0 before the first."""
        return self._iteration_seconds

    @property
    def is_filling_owed(self) -> bool:
        """Whether it is the turn of what fills, even if something urgent waits."""
        return self._owed_seconds > 0

    def note_decoding(
        self, now: float, holder: tuple[str, str] = ("", ""), is_single: bool = True
    ) -> None:
        """Note that a step of a holder that decodes has come in, and is the only one waiting."""
        self._decoding.note(now, holder)
        if is_single:
            self._decoding_singly.note(now, holder)

    def find_in_company(
        self, holders: Collection[tuple[str, str]], now: float
    ) -> set[tuple[str, str]]:
        """Return those of the holders beside whom others decode, in one session each."""
        singly = self._decoding_singly.find(now)
        return {holder for holder in holders if singly - {holder}}

    def choose_budget(self, now: float) -> int:
        """Return how many tokens of prompts the next iteration may carry, or as much else."""
        if not self._token_seconds:
            return self._least_tokens
        seconds = _IDLE_SECONDS
        if self._decoding.find(now):
            seconds = max(self._shared_seconds, min(self._decode_seconds, _IDLE_SECONDS))
        num_tokens = int(seconds / self._token_seconds)
        return max(self._least_tokens, min(num_tokens, self._token_budget))

    def begin_filling(self, now: float) -> None:
        """Note that an iteration begins that gives way to what is urgent."""
        self._filling_since = now

    def must_give_way(self, now: float) -> bool:
        """Return whether this iteration has had its time, and stops for what is urgent."""
        return now - self._filling_since >= self._owed_seconds

    def note(self, now: float, seconds: float, num_urgent: int, num_filling: int) -> None:
        """Note an iteration that ended now, and how long it took without interruptions.

        It carried `num_urgent` steps that were, and tokens of prompts, or as much, that filled.
        """
        self._iteration_seconds = _smooth(self._iteration_seconds, seconds)
        if num_filling == 0:
            self._decode_seconds = _smooth(self._decode_seconds, seconds)
            self._owed_seconds, self._filling_since = seconds, now
            return
        self._owed_seconds = 0.0  # everybody had a turn
        if num_urgent == 0 or self._decode_seconds:
            rest = max(seconds - (self._decode_seconds if num_urgent else 0.0), 0.0)
            self._token_seconds = _smooth(self._token_seconds, rest / num_filling)


def _smooth(average: float, value: float) -> float:
    return average + _SMOOTHING * (value - average) if average else value
