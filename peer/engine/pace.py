"""How much one iteration may carry, so that those who decode hardly notice each other."""

from collections import Counter

Holder = tuple[str, str]
"""Whose a step is: an address, and a client there."""

_IDLE_SECONDS = 0.03
"""How long an iteration may be when nobody decodes: a newcomer waits for one to open its session
and for another with its first tokens, at every peer."""

_BLOCK_SECONDS = 0.002
"""While somebody decodes, how long a block may take for what fills the time: a step that is urgent
waits until it is done."""

_RECENT_SECONDS = 0.25
_RECENT_ITERATIONS = 8
"""A session decodes as long as its last step was within these seconds, or so many iterations."""

_FEW_ROWS = 4
"""What people decode at once; programs decode more."""

_SMOOTHING = 0.2


class _Decoding:
    """The sessions that had a step of late, and their rows."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[Holder, int], tuple[float, int]] = {}

    def note(self, now: float, holder: Holder, session: int, num_rows: int) -> None:
        self._sessions.pop((holder, session), None)
        self._sessions[holder, session] = now, num_rows

    def forget(self, before: float) -> None:
        """Forget those whose last step was before a time: the first are the oldest."""
        for key, (noted_at, _) in list(self._sessions.items()):
            if noted_at >= before:
                break
            del self._sessions[key]

    def __bool__(self) -> bool:
        return bool(self._sessions)

    def count_rows(self) -> tuple[Counter[str], Counter[Holder]]:
        """Return the rows of each address and of each holder."""
        addresses: Counter[str] = Counter()
        holders: Counter[Holder] = Counter()
        for (holder, _), (_, num_rows) in self._sessions.items():
            addresses[holder[0]] += num_rows
            holders[holder] += num_rows
        return addresses, holders


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
        self._decoding = _Decoding()
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

    def note_decoding(self, now: float, holder: Holder, session: int, num_rows: int) -> None:
        """Note that a step that decodes has come in, or was computed."""
        self._decoding.note(now, holder, session, num_rows)

    def find_crowding(self, now: float) -> set[Holder]:
        """Return who decodes many rows beside others who decode few.

        Names cost nothing: many clients of one address are like one beside another address.
        """
        self._forget(now)
        addresses, holders = self._decoding.count_rows()
        few_of_address = min(addresses.values(), default=0) <= _FEW_ROWS
        few_of_holder = min(holders.values(), default=0) <= _FEW_ROWS
        return {
            holder
            for holder, num_rows in holders.items()
            if (few_of_holder and num_rows > _FEW_ROWS)
            or (few_of_address and addresses[holder[0]] > _FEW_ROWS)
        }

    def choose_budget(self, now: float) -> int:
        """Return how many tokens of prompts the next iteration may carry, or as much else."""
        if not self._token_seconds:
            return self._least_tokens
        seconds = _IDLE_SECONDS
        self._forget(now)
        if self._decoding:
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

    def _forget(self, now: float) -> None:
        recent = max(_RECENT_SECONDS, _RECENT_ITERATIONS * self._iteration_seconds)
        self._decoding.forget(now - recent)


def _smooth(average: float, value: float) -> float:
    return average + _SMOOTHING * (value - average) if average else value
