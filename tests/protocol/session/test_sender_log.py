"""What a hop has pushed rebuilds the caches behind it: those of new hops, and those that went on.

A chain of two hops behind the sender: `near` is lost and rebuilt, `far` keeps what it has. Each
hop passes on what it gets, so that both hold the same tokens.
"""

import random
from dataclasses import replace

import pytest

from shoal.protocol.errors import ErrorCode, RefusedError
from shoal.protocol.session.recovery_log import SenderLog, SentStep

Rows = list[list[int]]


class Cache:
    """The oracle: what a hop holds, and the newest step it took."""

    def __init__(self, num_rows: int) -> None:
        self.rows: Rows = [[] for _ in range(num_rows)]
        self.sequence = 0

    def take(self, sent: SentStep[Rows]) -> None:
        """Do what the table of a session says: repeats are dropped."""
        if sent.sequence <= self.sequence:
            return
        assert all(sent.position <= len(row) for row in self.rows), "a gap"
        kept = [row[: sent.position] for row in self.rows]
        if sent.row_map is not None:
            kept = [list(kept[row]) for row in sent.row_map]
        self.rows = [row + new for row, new in zip(kept, sent.payload, strict=True)]
        self.sequence = sent.sequence


def rebuild(log: SenderLog[Rows], num_rows: int, resume_sequence: int) -> tuple[Cache, list[int]]:
    """Return what a new hop holds after replay and rest, and the steps of the rest."""
    cache = Cache(num_rows)
    prefix, rest = log.plan(resume_sequence)
    assert len(prefix) < resume_sequence  # a replay is numbered from 1, and older than the rest
    for number, piece in enumerate(prefix, 1):
        order = range(num_rows) if piece.rows is None else piece.rows
        payload = [piece.payload[row][: piece.num_tokens] for row in order]
        cache.take(SentStep(number, piece.position, piece.num_tokens, payload))
    cache.sequence = min(cache.sequence, resume_sequence - 1)
    for sent in rest:
        cache.take(sent)
    return cache, [sent.sequence for sent in rest]


def draw_step(rng: random.Random, sequence: int, length: int, num_rows: int) -> SentStep[Rows]:
    num_tokens = rng.choice((1, 1, 3))
    position = rng.randrange(length + 1) if rng.random() < 0.3 else length
    row_map = None
    if rng.random() < 0.3:
        row_map = tuple(rng.randrange(num_rows) for _ in range(num_rows))
    payload = [[rng.randrange(10**6) for _ in range(num_tokens)] for _ in range(num_rows)]
    return SentStep(sequence, position, num_tokens, payload, row_map, num_tokens == 1)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_new_hop_holds_the_same_and_the_hop_behind_misses_nothing(seed: int, num_rows: int) -> None:
    rng = random.Random(seed)
    log, near, far = SenderLog[Rows](), Cache(num_rows), Cache(num_rows)
    for sequence in range(1, 40):
        sent = draw_step(rng, sequence, log.length, num_rows)
        log.append(sent)
        near.take(sent)
        # The step under way may have been lost with the hop between, or have passed it.
        was_passed_on = rng.random() < 0.5
        if was_passed_on:
            far.take(sent)

        rebuilt, rest = rebuild(log, num_rows, sequence)

        assert rebuilt.rows == near.rows
        assert rest == [sequence]
        far.take(sent)
        assert far.rows == near.rows


def test_several_steps_under_way_are_sent_as_they_were() -> None:
    log, near = SenderLog[Rows](), Cache(1)
    steps = [SentStep(n, 2 * (n - 1), 2, [[10 * n, 10 * n + 1]]) for n in range(1, 6)]
    for sent in steps:
        log.append(sent)
        near.take(sent)

    rebuilt, rest = rebuild(log, 1, 3)

    assert rest == [3, 4, 5]
    assert rebuilt.rows == near.rows


def test_step_that_was_settled_since_is_not_there_any_more() -> None:
    log = SenderLog[Rows]()
    log.append(SentStep(1, 0, 2, [[1, 2]]))
    log.append(SentStep(2, 2, 1, [[3]]))
    log.append(SentStep(3, 1, 1, [[4]]))  # went back: whoever asks for 2 knows less than we do

    with pytest.raises(RefusedError) as refusal:
        log.plan(2)

    assert refusal.value.code is ErrorCode.LOG_INCOMPLETE
    assert rebuild(log, 1, 3)[0].rows == [[1, 4]]


def test_what_is_rolled_back_is_given_back() -> None:
    log = SenderLog[Rows]()
    payloads: list[Rows] = [[[1, 2]], [[3]], [[4]], [[5]]]
    log.append(SentStep(1, 0, 2, payloads[0]))
    log.append(SentStep(2, 2, 1, payloads[1]))
    log.append(SentStep(3, 3, 1, payloads[2]))

    assert log.append(SentStep(4, 2, 1, payloads[3])) == [payloads[2], payloads[1]]

    assert log.payloads == [payloads[0], payloads[3]]
    assert log.length == 3


def test_fork_begins_with_a_prefix_and_goes_on_counting() -> None:
    log = SenderLog[Rows]()
    log.append(SentStep(7, 0, 3, [[1, 2, 3]]))
    log.append(SentStep(8, 3, 1, [[4]], is_decoded=True))

    twin = log.begin_fork(2)
    twin.append(SentStep(9, 2, 1, [[9]], is_decoded=True))

    assert rebuild(twin, 1, 9)[0].rows == [[1, 2, 9]]
    assert rebuild(log, 1, 8)[0].rows == [[1, 2, 3, 4]]


def test_marks_of_a_step_survive() -> None:
    log = SenderLog[Rows]()
    sent = SentStep(1, 0, 1, [[1], [2]], (1, 0), is_decoded=True, last_token_only=True)
    log.append(sent)
    log.append(replace(sent, sequence=2, position=1, row_map=None))

    prefix, rest = log.plan(2)

    assert [piece.is_decoded for piece in prefix] == [True]
    assert rest == [replace(sent, sequence=2, position=1, row_map=None)]
