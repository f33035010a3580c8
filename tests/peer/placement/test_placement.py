"""Which span a peer takes, when it moves, and who gives way to whom."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from announcements import describe_peer

from shoal.peer.placement.placement import (
    MIN_RESIDENCY_SECONDS,
    Candidate,
    Intent,
    Placement,
    decide_placement,
)
from shoal.peer.placement.supply import BlockRoom, Supply
from shoal.protocol.ids import ModelId, PeerId
from shoal.protocol.records.announcements import Announcement, PeerState
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.spans import Span

MODEL = ModelId("a" * 32)
NOW = 1_800_000_000.0
LONG = 10 * MIN_RESIDENCY_SECONDS


def make_peer(name: str, span: tuple[int, int], speed: float | None = 100.0, **changes: Any):
    """Return an ONLINE peer of a model with 8 blocks, with its speed in blocks per second."""
    length = span[1] - span[0]
    fields: dict[str, Any] = {
        "peer_id": PeerId(name),
        "model_id": MODEL,
        "num_blocks": 8,
        "span": Span(*span),
        "issued_at": NOW,
        "expires_at": NOW + 90,
        "decode_steps_per_second": None if speed is None else speed / length,
    }
    return describe_peer(**(fields | changes))


def make_view(peers: Iterable[Announcement], num_blocks: int = 8) -> SwarmView:
    return SwarmView.from_announcements(MODEL, peers, NOW, num_blocks)


def make_candidate(name: str, span: tuple[int, int] | None = None, **changes: Any) -> Candidate:
    """Return a peer with memory for four blocks that has been where it is for long."""
    fields: dict[str, Any] = {
        "peer_id": PeerId(name),
        "room": BlockRoom(4),
        "blocks_per_second": 100.0,
        "load_seconds": 1.0,
        "span": None if span is None else Span(*span),
        "residency_seconds": LONG,
    }
    return Candidate(**(fields | changes))


def decide(peers: Iterable[Announcement], candidate: Candidate, seed: int = 0) -> Placement:
    return decide_placement(Supply.of_view(make_view(peers)), candidate, random.Random(seed))


def decide_often(peers: list[Announcement], candidate: Candidate) -> set[Span | None]:
    """Return what a peer decides for many seeds: whoever it is whose turn it is."""
    return {decide(peers, candidate, seed).span for seed in range(50)}


def test_newcomer_takes_what_nobody_serves() -> None:
    decision = decide([make_peer("a", (0, 4)), make_peer("b", (0, 4))], make_candidate("c"))

    assert decision.span == Span(4, 8)
    assert decision.why == "no peer serves them"


def test_newcomer_gives_a_second_replica_before_it_helps_a_slow_span() -> None:
    peers = [make_peer("fast", (0, 4), 400), make_peer("x", (4, 8), 1), make_peer("y", (4, 8), 1)]

    assert decide(peers, make_candidate("c")).span == Span(0, 4)


def test_newcomer_helps_where_speed_is_scarce_once_there_are_replicas() -> None:
    peers = [make_peer(name, (0, 4), 100) for name in "ab"]
    peers += [make_peer(name, (4, 8), 60) for name in "xy"]

    decision = decide(peers, make_candidate("c"))

    assert decision.span == Span(4, 8)
    assert decision.why == "the slowest of them has 57 % of an even share of throughput"


@pytest.mark.parametrize("num_peers", [2, 4, 6, 8])
@pytest.mark.parametrize("seed", range(5))
def test_equal_newcomers_tile_the_model(num_peers: int, seed: int) -> None:
    peers: list[Announcement] = []
    for index in range(num_peers):
        span = decide(peers, make_candidate(f"p{index}"), seed).span
        assert span is not None
        peers.append(make_peer(f"p{index}", (span.start, span.stop)))

    assert sorted(peer.span for peer in peers) == sorted(
        [Span(0, 4), Span(4, 8)] * (num_peers // 2)
    )


def test_memory_for_more_than_the_model_takes_all_of_it() -> None:
    assert decide([], make_candidate("c", room=BlockRoom(99))).span == Span(0, 8)


def test_no_memory_or_no_model_is_no_place() -> None:
    empty = SwarmView(MODEL, 0, NOW, ())

    assert decide([], make_candidate("c", room=BlockRoom(0))).span is None
    assert (
        decide_placement(Supply.of_view(empty), make_candidate("c"), random.Random()).span is None
    )


def test_gap_that_somebody_is_about_to_fill_is_not_taken_twice() -> None:
    peers = [make_peer("a", (0, 4)), make_peer("b", (4, 8), None, state=PeerState.JOINING)]
    mover = make_candidate("m", (0, 4))

    # It does become the second host of one half, whichever.
    assert decide([make_peer("m", (0, 4)), *peers], mover).span == mover.span
    assert decide([make_peer("m", (0, 4)), peers[0]], mover).span == Span(4, 8)


@pytest.mark.parametrize("state", [PeerState.DRAINING, PeerState.OFFLINE])
def test_who_leaves_hosts_nothing(state: PeerState) -> None:
    peers = [make_peer("a", (0, 4)), make_peer("b", (4, 8), state=state)]

    assert decide(peers, make_candidate("c")).span == Span(4, 8)


def test_who_has_not_renewed_its_announcement_is_replaced_long_before_it_expires() -> None:
    late = make_peer("b", (4, 8), issued_at=NOW - 35, expires_at=NOW + 55)
    punctual = make_peer("b", (4, 8), issued_at=NOW - 34, expires_at=NOW + 56)
    others = [make_peer(name, (0, 4)) for name in "acd"]
    mover = make_candidate("c", (0, 4), residency_seconds=60.0)  # only a gap moves it

    assert decide_often([*others, punctual], mover) == {Span(0, 4)}
    assert decide([*others, late], mover).span == Span(4, 8)


def test_peer_does_not_move_again_soon_unless_there_is_a_gap() -> None:
    peers = [make_peer(name, (0, 4)) for name in "abcd"] + [make_peer("x", (4, 8))]
    settled = make_candidate("a", (0, 4))
    young = make_candidate("a", (0, 4), residency_seconds=MIN_RESIDENCY_SECONDS - 1)

    assert Span(4, 8) in decide_often(peers, settled)
    assert decide_often(peers, young) == {Span(0, 4)}
    assert Span(4, 8) in decide_often(peers[:-1], young)


def test_peer_that_has_moved_stays_for_an_hour_unless_there_is_a_gap() -> None:
    peers = [make_peer(name, (0, 4)) for name in "abcd"] + [make_peer("x", (4, 8))]

    def decide_after(seconds: float, others: list[Announcement]) -> set[Span | None]:
        mover = make_candidate("a", (0, 4), has_moved=True, residency_seconds=seconds)
        return decide_often(others, mover)

    assert decide_after(3599, peers) == {Span(0, 4)}
    assert Span(4, 8) in decide_after(3600, peers)
    assert Span(4, 8) in decide_after(30, peers[:-1])


def test_only_host_of_a_block_never_leaves() -> None:
    peers = [make_peer("a", (0, 4)), make_peer("b", (4, 6))]

    assert decide_often(peers, make_candidate("a", (0, 4))) == {Span(0, 4)}
    # An intent is no host yet.
    soon = make_peer("c", (0, 4), None, state=PeerState.JOINING)
    assert decide_often([*peers, soon], make_candidate("a", (0, 4))) == {Span(0, 4)}


def test_peer_waits_for_the_replica_that_is_about_to_come_unless_there_is_a_gap() -> None:
    slow = [make_peer(name, (4, 8), 20) for name in "xy"]
    mover, other = make_candidate("m", (0, 4)), make_peer("a", (0, 4))
    coming = [make_peer(name, (0, 4), state=PeerState.JOINING) for name in "bc"]
    there = [make_peer(name, (0, 4)) for name in "bc"]

    assert decide_often([other, *coming, *slow], mover) == {Span(0, 4)}
    assert Span(4, 8) in decide_often([other, *there, *slow], mover)
    assert decide_often([other, *coming], mover) >= {Span(4, 8)}


def test_small_advantage_moves_nobody() -> None:
    def swarm(speed: float) -> list[Announcement]:
        return [
            *(make_peer(f"a{index}", (0, 4)) for index in range(12)),
            *(make_peer(f"b{index}", (4, 8), speed) for index in range(10)),
        ]

    mover = make_candidate("a0", (0, 4))

    assert decide_often(swarm(110), mover) == {Span(0, 4)}
    assert decide_often(swarm(90), mover) == {Span(0, 4), Span(4, 8)}


def test_edge_moves_when_that_is_enough() -> None:
    peers = [make_peer(f"a{index}", (0, 4)) for index in range(4)]
    peers += [make_peer(f"b{index}", (5, 8)) for index in range(3)]

    assert decide_often(peers, make_candidate("a0", (0, 4))) == {Span(1, 5)}


def test_move_is_not_worth_hours_of_loading() -> None:
    peers = [make_peer(name, (0, 4)) for name in "abcd"] + [make_peer(n, (4, 8), 60) for n in "xy"]

    assert Span(4, 8) in decide_often(peers, make_candidate("a", (0, 4)))
    assert decide_often(peers, make_candidate("a", (0, 4), load_seconds=3600.0)) == {Span(0, 4)}


def plan_together(names: list[str], others: list[Announcement]) -> dict[str, Placement]:
    """Let peers that serve 0:4 decide at the same moment, and again on each other's intents."""
    before = Supply.of_view(make_view([*others, *(make_peer(name, (0, 4)) for name in names)]))
    planned = {name: decide_placement(before, make_candidate(name, (0, 4)), random.Random(0))
               for name in names}  # fmt: skip
    joining = [
        make_peer(name, (decision.span.start, decision.span.stop), state=PeerState.JOINING)
        for name, decision in planned.items()
        if decision.span not in (None, Span(0, 4))
    ]
    after = Supply.of_view(make_view([*others, *joining]))
    return {
        name: decide_placement(
            after,
            make_candidate(name, (0, 4), intent=Intent(decision.span, before)),
            random.Random(0),
        )
        for name, decision in planned.items()
        if decision.span is not None
    }


@pytest.mark.parametrize("others", [[], [make_peer("z", (0, 4))]])
def test_of_two_movers_for_one_gap_the_one_with_the_lower_id_gives_way(
    others: list[Announcement],
) -> None:
    decisions = plan_together(["a", "b"], others)

    # Even though nobody would be left at the old place if both went.
    assert {name: decision.span for name, decision in decisions.items()} == {
        "a": Span(0, 4),
        "b": Span(4, 8),
    }


def test_of_many_movers_only_as_many_go_as_are_needed() -> None:
    names = [f"p{index}" for index in range(6)]

    decisions = plan_together(names, [])

    goes = [name for name in names if decisions[name].span == Span(4, 8)]
    # One closes the gap, one is the second replica, and with the third both halves are equal.
    assert goes == ["p3", "p4", "p5"]


def test_intent_that_was_known_before_holds_against_a_higher_id() -> None:
    others = [make_peer(name, (0, 4)) for name in "abc"]
    early = make_peer("early", (4, 8), None, state=PeerState.JOINING)
    supply = Supply.of_view(make_view([*others, early]))

    decision = decide_placement(
        supply, make_candidate("z", intent=Intent(Span(4, 8), supply)), random.Random(0)
    )

    assert decision.span == Span(4, 8)  # as the second host: the first is taken into account


def test_newcomer_that_was_outdone_goes_elsewhere() -> None:
    empty = Supply.of_view(make_view([]))
    rival = make_peer("z", (0, 4), None, state=PeerState.JOINING)
    newcomer = make_candidate("a", intent=Intent(Span(0, 4), empty))

    assert decide([rival], newcomer).span == Span(4, 8)
    assert decide([make_peer("Z", (0, 4), None, state=PeerState.JOINING)], newcomer).span == Span(
        0, 4
    )


def settle(peers: dict[str, Announcement], honest: list[str], rng: random.Random) -> int:
    """Let peers move one after the other until nobody wants to; return how often they did."""
    num_moves, num_quiet = 0, 0
    while num_quiet < 60 * len(honest) and num_moves < 1000:
        name = rng.choice(honest)
        own = peers[name]
        speed = (own.decode_steps_per_second or 0) * len(own.span)
        mover = make_candidate(
            name,
            (own.span.start, own.span.stop),
            blocks_per_second=speed,
            room=BlockRoom(len(own.span)),
        )
        decision = decide_placement(
            Supply.of_view(make_view(peers.values(), own.num_blocks)), mover, rng
        )
        assert decision.span is not None
        num_quiet += 1
        if decision.span != own.span:
            peers[name] = make_peer(
                name, (decision.span.start, decision.span.stop), speed, num_blocks=own.num_blocks
            )
            num_moves, num_quiet = num_moves + 1, 0
    return num_moves


@pytest.mark.parametrize("seed", range(6))
def test_moves_end_wherever_peers_begin(seed: int) -> None:
    rng = random.Random(seed)
    peers: dict[str, Announcement] = {}
    for index in range(rng.randint(4, 12)):
        length = rng.randint(2, 8)
        start = rng.randint(0, 12 - length)
        peers[f"p{index}"] = make_peer(
            f"p{index}", (start, start + length), rng.uniform(20, 200), num_blocks=12
        )

    assert settle(peers, list(peers), rng) <= 3 * len(peers)


@pytest.mark.parametrize("num_honest", [3, 6, 10, 20])
def test_peer_that_lies_about_its_speed_empties_no_span(num_honest: int) -> None:
    rng = random.Random(num_honest)
    honest = [f"p{index}" for index in range(num_honest)]
    peers = {name: make_peer(name, (0, 4) if rng.random() < 0.5 else (4, 8)) for name in honest}
    peers |= {"liar": make_peer("liar", (0, 4), 4e12)}

    settle(peers, honest, rng)

    hosts = [sum(block in peers[name].span for name in honest) for block in range(8)]
    # It is believed to be four times as fast as others, so it stands for four of them at most.
    assert min(hosts) >= max(1, (num_honest - 6) // 2)


def test_peer_that_claims_all_blocks_counts_once_at_each() -> None:
    peers = [make_peer("liar", (0, 8), 1e12), make_peer("a", (0, 4)), make_peer("b", (0, 4))]

    assert decide(peers, make_candidate("c")).span == Span(4, 8)


def test_peer_that_says_it_has_no_speed_hosts_nothing() -> None:
    peers = [make_peer(name, (0, 4), 0.0) for name in "abc"] + [make_peer("x", (4, 8))]

    assert decide(peers, make_candidate("c")).span == Span(0, 4)


def test_span_is_as_long_as_memory_holds_of_the_blocks_that_are_there() -> None:
    """The first four blocks take a third of what the last four take."""
    room = BlockRoom(6, sizes=(1, 1, 1, 1, 3, 3, 3, 3))

    assert decide([], make_candidate("c", room=room)).span == Span(0, 4)
    assert decide([make_peer("a", (0, 4))], make_candidate("c", room=room)).span in (
        Span(4, 6),
        Span(6, 8),
    )
    tight = BlockRoom(2, sizes=room.sizes)
    assert decide([make_peer("a", (0, 4))], make_candidate("c", room=tight)).span in (
        Span(0, 2),
        Span(2, 4),
    )


def test_steps_through_dear_blocks_count_as_more_work() -> None:
    """A peer does 25 steps a second at 4:8, or 75 at 0:4: it is the same machine."""
    work = (0.5, 0.5, 0.5, 0.5, 1.5, 1.5, 1.5, 1.5)
    cheap = [make_peer(name, (0, 4), 150) for name in "ab"]
    dear = [make_peer(name, (4, 8), 150) for name in "xyz"]

    supply = Supply.of_view(make_view([*cheap, *dear]), work=work)

    assert supply.total_blocks_per_second == pytest.approx(75 * 2 + 37.5 * 6 * 3)
    assert supply.typical_blocks_per_second == 225


@pytest.mark.parametrize("ratio", [1.0, 3.0, 10.0])
def test_newcomers_give_cheap_and_dear_blocks_the_same_speed(ratio: float) -> None:
    work = np.array([1.0] * 4 + [ratio] * 4) * 2 / (1 + ratio)
    peers: list[Announcement] = []
    for index in range(40):
        supply = Supply.of_view(make_view(peers), work=work.tolist())
        span = decide_placement(supply, make_candidate(f"p{index}"), random.Random(index)).span
        assert span is not None
        steps = 100.0 / float(work[span.start : span.stop].sum())
        peers.append(make_peer(f"p{index}", (span.start, span.stop), steps * len(span)))

    speeds = Supply.of_view(make_view(peers), work=work.tolist()).steps_per_second

    assert speeds.max() < 1.3 * speeds.min()


@pytest.mark.parametrize("blocks", [{4}, {7}, {4, 5, 6, 7}])
def test_blocks_that_could_not_be_loaded_are_avoided(blocks: set[int]) -> None:
    peers = [make_peer("m", (0, 4)), make_peer("a", (0, 4))]
    mover = make_candidate("m", (0, 4), room=BlockRoom(4), avoided=frozenset(blocks))

    spans = decide_often(peers, mover)

    assert Span(4, 8) not in spans
    assert not any(block in span for span in spans if span for block in blocks)


def test_peer_that_can_load_nothing_stays() -> None:
    everything = frozenset(range(8))
    assert decide([], make_candidate("c", avoided=everything)).span is None
    mover = make_candidate("m", (0, 4), avoided=everything)
    assert decide([make_peer("a", (0, 4))], mover).span == mover.span


def test_doubted_peers_do_not_count() -> None:
    view = make_view([make_peer("a", (0, 4)), make_peer("b", (4, 8))])

    supply = Supply.of_view(view, doubted={PeerId("b")})

    assert decide_placement(supply, make_candidate("c"), random.Random(0)).span == Span(4, 8)


def draw_hostile_peer(rng: random.Random, index: int) -> Announcement:
    """Return an announcement that is well formed and otherwise as bad as can be."""
    num_blocks = rng.choice((1, 8, 8, 8, 4096))
    start = rng.randrange(num_blocks)
    stop = rng.randint(start + 1, num_blocks)
    issued_at = rng.choice((0.0, NOW - 60, NOW, NOW + 3, 1e11))
    return describe_peer(
        peer_id=PeerId(f"p{index}"),
        model_id=MODEL,
        num_blocks=num_blocks,
        span=Span(start, stop),
        state=rng.choice(list(PeerState)),
        issued_at=issued_at,
        expires_at=issued_at + rng.choice((1.0, 90.0, 600.0)),
        decode_steps_per_second=rng.choice((None, 0.0, 5e-324, 1e-9, 1.0, 100.0, 1e12)),
        queue_seconds=rng.choice((0.0, 1e12)),
    )


@pytest.mark.parametrize("seed", range(100))
def test_decision_is_valid_whatever_the_view_contains(seed: int) -> None:
    rng = random.Random(seed)
    peers = [draw_hostile_peer(rng, index) for index in range(rng.randint(0, 12))]
    # Made by hand, so that peers that disagree about the model stay in it.
    view = SwarmView(MODEL, rng.choice((0, 1, 8)), NOW, tuple(peers))
    supply = Supply.of_view(view)
    own = rng.choice((None, (0, 1))) if view.num_blocks else None
    candidate = make_candidate(
        f"p{rng.randint(0, 14)}",
        room=BlockRoom(rng.choice((0, 1, 3, 8, 10**6))),
        blocks_per_second=rng.choice((0.0, 5e-324, 100.0, 1e15)),
        load_seconds=rng.choice((0.0, 1.0, 1e12)),
        span=own,
        residency_seconds=rng.choice((0.0, LONG)),
        intent=rng.choice((None, Intent(Span(0, 1), supply))) if view.num_blocks else None,
    )

    decision = decide_placement(supply, candidate, random.Random(seed))

    assert decision == decide_placement(supply, candidate, random.Random(seed))
    assert decision.why
    if decision.span == candidate.span:
        return
    assert decision.span is not None
    assert decision.span.stop <= view.num_blocks
    assert len(decision.span) <= candidate.room.amount
