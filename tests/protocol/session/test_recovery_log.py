"""A replay of the log rebuilds the cache, whatever happened to it."""

import gc
import random
from typing import Any

import pytest

from shoal.protocol.errors import LocalProtocolError
from shoal.protocol.session.recovery_log import LogEntry, RecoveryLog, ReplayPiece

Rows = list[list[int]]
"""A cache: the tokens of each row."""


class Cache:
    """The oracle: what a peer's cache holds after every step, row by row."""

    def __init__(self, num_rows: int) -> None:
        self.rows: Rows = [[] for _ in range(num_rows)]

    def apply(self, position: int, tokens: Rows, row_map: list[int] | None) -> None:
        kept = [row[:position] for row in self.rows]
        if row_map is not None:
            kept = [list(kept[row]) for row in row_map]
        self.rows = [row + new for row, new in zip(kept, tokens, strict=True)]

    def roll_back(self, position: int) -> None:
        self.rows = [row[:position] for row in self.rows]


def rebuild(pieces: list[ReplayPiece[Rows]], num_rows: int) -> Rows:
    """Send the pieces into an empty cache; each has to begin where the one before ended."""
    rows: Rows = [[] for _ in range(num_rows)]
    for piece in pieces:
        assert piece.num_tokens > 0
        assert all(len(row) == piece.position for row in rows)
        order = range(num_rows) if piece.rows is None else piece.rows
        assert len(order) == num_rows
        for row, source in zip(rows, order, strict=True):
            row.extend(piece.payload[source][: piece.num_tokens])
    return rows


def draw_tokens(rng: random.Random, num_rows: int, num_tokens: int) -> Rows:
    return [[rng.randrange(10**6) for _ in range(num_tokens)] for _ in range(num_rows)]


def draw_row_map(rng: random.Random, num_rows: int) -> list[int] | None:
    kind = rng.randrange(4)
    if kind == 0:
        return None
    if kind == 1:
        return list(range(num_rows))
    return [rng.randrange(num_rows) for _ in range(num_rows)]


@pytest.mark.parametrize("num_rows", [1, 2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_replay_rebuilds_the_cache_after_every_operation(seed: int, num_rows: int) -> None:
    rng = random.Random(1000 * num_rows + seed)
    log, cache = RecoveryLog[Rows](), Cache(num_rows)

    for _ in range(250):
        if rng.random() < 0.1:
            position = rng.randint(0, log.length)
            log.rollback(position)
            cache.roll_back(position)
        else:
            # Most steps go on at the end; some roll back by a few tokens or by many.
            back = rng.choice((0, 0, 0, 0, rng.randrange(4), rng.randint(0, log.length)))
            position = max(0, log.length - back)
            tokens = draw_tokens(rng, num_rows, rng.randint(1, 5))
            row_map = draw_row_map(rng, num_rows)
            log.append(position, len(tokens[0]), tokens, row_map, is_decoded=rng.random() < 0.5)
            cache.apply(position, tokens, row_map)
        assert log.length == len(cache.rows[0])
        assert rebuild(log.plan_replay(), num_rows) == cache.rows


def test_pieces_keep_how_they_were_computed() -> None:
    log = RecoveryLog[str]()
    log.append(0, 4, "prompt")
    log.append(4, 1, "first", is_decoded=True)
    log.append(5, 2, "speculated")
    log.append(6, 1, "second", is_decoded=True)

    pieces = [(p.payload, p.position, p.num_tokens, p.is_decoded) for p in log.plan_replay()]

    assert pieces == [
        ("prompt", 0, 4, False),
        ("first", 4, 1, True),
        ("speculated", 5, 1, False),
        ("second", 6, 1, True),
    ]


def test_empty_log_replays_nothing() -> None:
    assert RecoveryLog[str]().plan_replay() == []
    assert RecoveryLog[str]().length == 0


def test_rollback_to_the_start_forgets_everything() -> None:
    log = RecoveryLog[str]()
    log.append(0, 4, "prompt")
    log.append(4, 1, "next", row_map=[1, 0])

    log.rollback(0)
    log.append(0, 2, "again")

    assert [(piece.payload, piece.rows) for piece in log.plan_replay()] == [("again", None)]


def test_row_map_of_a_first_step_moves_nothing() -> None:
    log = RecoveryLog[str]()

    log.append(0, 4, "prompt", row_map=[1, 1])

    assert [piece.rows for piece in log.plan_replay()] == [None]


def snapshot(log: RecoveryLog[str]) -> tuple[int, list[ReplayPiece[str]]]:
    return log.length, log.plan_replay()


@pytest.mark.parametrize(
    ("position", "num_tokens"), [(6, 1), (-1, 1), (100, 1), (5, 0), (3, 0), (5, -1)]
)
def test_impossible_step_is_our_own_fault_and_changes_nothing(
    position: int, num_tokens: int
) -> None:
    log = RecoveryLog[str]()
    log.append(0, 4, "prompt")
    log.append(4, 1, "next", row_map=[1, 0])
    before = snapshot(log)

    with pytest.raises(LocalProtocolError):
        log.append(position, num_tokens, "wrong", row_map=[1, 1])

    assert snapshot(log) == before


@pytest.mark.parametrize("position", [-1, 6])
def test_impossible_rollback_changes_nothing(position: int) -> None:
    log = RecoveryLog[str]()
    log.append(0, 5, "prompt")
    before = snapshot(log)

    with pytest.raises(LocalProtocolError):
        log.rollback(position)

    assert snapshot(log) == before


def test_copies_go_their_own_ways() -> None:
    log = RecoveryLog[str]()
    log.append(0, 4, "prompt")
    log.append(4, 1, "next", row_map=[1, 0])
    before = snapshot(log)

    twin = log.copy()
    assert snapshot(twin) == before
    twin.append(5, 1, "more", row_map=[1, 1])
    assert snapshot(log) == before
    twin.rollback(2)
    assert snapshot(log) == before

    twin = log.copy()
    after = snapshot(twin)
    log.append(3, 1, "other", row_map=[0, 0])
    log.append(4, 1, "maps", row_map=[1, 1])
    assert snapshot(twin) == after


def list_entries() -> list[LogEntry[Any]]:
    """Return the log entries that are in memory."""
    return [found for found in gc.get_objects() if isinstance(found, LogEntry)]


def test_copy_shares_every_entry_however_many_there_are() -> None:
    log = RecoveryLog[str]()
    for position in range(1000):
        log.append(position, 1, "token", row_map=[1, 0], is_decoded=True)
    num_entries = len(list_entries())
    oldest = next(entry for entry in list_entries() if entry.position == 0)
    num_holders = len(gc.get_referrers(oldest))

    twins = [log.copy() for _ in range(10)]
    for twin in twins:
        twin.append(1000, 1, "its own")

    assert len(list_entries()) == num_entries + len(twins)
    assert len(gc.get_referrers(oldest)) == num_holders


def test_long_log_is_dropped_without_recursion() -> None:
    log = RecoveryLog[str]()
    for position in range(20_000):
        log.append(position, 1, "token", row_map=[1, 0])

    log.rollback(0)

    assert log.plan_replay() == []


def test_beam_search_keeps_one_row_map_per_step() -> None:
    log = RecoveryLog[str]()
    log.append(0, 4, "prompt")

    for position in range(4, 1004):
        log.append(position, 1, "token", row_map=[1, 0], is_decoded=True)

    assert log.num_row_maps == 1000
    pieces = log.plan_replay()
    assert len(pieces) == 1001
    assert pieces[0].rows is None or pieces[0].rows == (0, 1)  # an even number of swaps
    assert pieces[1].rows == (1, 0)


def test_going_back_over_and_over_keeps_no_more_than_once() -> None:
    log = RecoveryLog[str]()
    log.append(0, 4, "prompt")

    for _ in range(200):
        log.append(4, 1, "retried", row_map=[1, 0])
    assert log.num_row_maps == 1

    for _ in range(20):
        log.rollback(4)
        for position in range(4, 14):
            log.append(position, 1, "token", row_map=[1, 1])
    assert log.num_row_maps <= 11
    assert len(log.plan_replay()) == 11

    for _ in range(20):
        log.append(0, 4, "another prompt")
        log.append(4, 1, "token", row_map=[1, 1])
    assert log.num_row_maps == 1
