"""A session over a swarm of scripted peers: its steps equal those of one machine."""

from __future__ import annotations

import asyncio
import gc
import random
from dataclasses import replace

import pytest
import torch
from session_scene import (
    CONFIG,
    MODEL_ID,
    NUM_BLOCKS,
    SECRET,
    WIDTH,
    Answer,
    Oracle,
    SessionScene,
    add_two_rows_of_peers,
    be_honest,
    draw,
    in_scene,
    now,
    run,
)

from shoal.client.session.hop_link import from_wire
from shoal.client.session.state import SessionFacts
from shoal.protocol.errors import UnavailableError, UsageError
from shoal.protocol.ids import SessionId
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Step
from shoal.protocol.net.memory.loopback import Link
from shoal.protocol.session.recovery_log import LogEntry
from shoal.protocol.spans import Span
from shoal.protocol.tensors import KVFormat, WireDtype


@in_scene()
async def test_steps_rollbacks_and_row_maps_equal_one_machine(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)
    session, oracle = scene.open_session(), Oracle()

    for index, row_map in enumerate([None, None, (1, 1), None, (0, 0), None]):
        hidden = draw(index, 1 + 3 * (index == 0), num_rows=2)
        assert torch.equal(await session.step(hidden, row_map), oracle.step(hidden, row_map))
    session.rollback(3)
    oracle.position = 3
    hidden = draw(9, 2, num_rows=2)
    output = await session.step(hidden, last_token_only=True)

    assert torch.equal(output, oracle.step(hidden)[:, -1:])
    assert session.position == 5
    assert session.failovers == []
    assert [str(hop.span) for hop in session.hops] == ["0:2", "2:4", "4:6"]


@in_scene()
async def test_rollback_beyond_the_session_is_a_usage_error(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)
    session = scene.open_session()
    await session.step(draw(1, 3))

    for position in (-1, 4):
        with pytest.raises(UsageError, match="the session is at 3"):
            session.rollback(position)
    assert session.position == 3


@pytest.mark.parametrize("row_map", [None, (1, 0)], ids=["plain", "moved rows"])
@in_scene()
async def test_step_copies_nothing_of_the_log(
    scene: SessionScene, row_map: tuple[int, ...] | None
) -> None:
    """What a step costs does not grow with the tokens before it."""
    peer = await scene.add("a", 0, NUM_BLOCKS)
    session, num_holders = scene.open_session(), list[int]()
    await session.step(draw(0, 3, num_rows=2))
    (piece,) = session._hops[0].log.plan_replay()
    (oldest,) = (o for o in gc.get_referrers(piece.payload) if isinstance(o, LogEntry))

    def count_holders(_: Message, answer: Answer) -> Answer:
        num_holders.append(len(gc.get_referrers(oldest)))
        return answer

    for number in range(20):
        await session.step(draw(number, num_rows=2), row_map, is_decoded=True)
    num_between = len(gc.get_referrers(oldest))
    peer.mischief = count_holders
    await session.step(draw(20, num_rows=2), row_map, is_decoded=True)
    peer.mischief = be_honest

    assert num_holders == [num_between]


@pytest.mark.parametrize(("num_rows", "expected"), [(1, "near"), (2, "roomy")])
@in_scene()
async def test_session_begins_where_its_rows_have_room_to_grow(
    scene: SessionScene, num_rows: int, expected: str
) -> None:
    roomy = {"free_kv_tokens": 1000, "decode_steps_per_second": 50.0}
    await scene.add("near", 0, NUM_BLOCKS, free_kv_tokens=100)
    await scene.add("roomy", 0, NUM_BLOCKS, **roomy)
    session = scene.open_session(max_tokens=100)

    await session.step(draw(1, 4, num_rows))

    assert scene.names_of(session) == [expected]


def test_session_in_int8_needs_half_the_room() -> None:
    facts = SessionFacts(MODEL_ID, Span(0, NUM_BLOCKS), WIDTH, 100)

    assert facts.count_kv_tokens(2) == 200
    assert replace(facts, kv_format=KVFormat.INT8).count_kv_tokens(2) == 100


@in_scene(config=replace(CONFIG, max_step_bytes=16 * WIDTH * 4))
async def test_long_prompts_travel_in_pieces(scene: SessionScene) -> None:
    peer = await scene.add("a", 0, NUM_BLOCKS)
    session, oracle = scene.open_session(), Oracle()
    prompt = draw(1, 50)

    assert torch.equal(await session.step(prompt), oracle.step(prompt))
    assert [step.hidden.tokens for step in peer.steps] == [16, 16, 16, 2]
    last = await session.step(prompt, last_token_only=True)
    assert torch.equal(last, oracle.step(prompt)[:, -1:])


@in_scene(config=replace(CONFIG, max_step_bytes=16 * WIDTH * 4))
async def test_progress_of_a_long_prompt_is_known_piece_by_piece(scene: SessionScene) -> None:
    seen: list[tuple[int, int]] = []

    def look(message: Message, answer: Answer) -> Answer:
        if isinstance(message, Step) and session.state.progress is not None:
            seen.append((session.state.progress.num_done, session.state.progress.num_tokens))
        return answer

    peer = await scene.add("a", 0, NUM_BLOCKS)
    peer.mischief = look
    session = scene.open_session()

    await session.step(draw(1, 50))

    assert seen == [(0, 50), (16, 50), (32, 50), (48, 50)]
    assert session.state.progress is None


@in_scene(Link(delay_seconds=0.05), replace(CONFIG, max_step_bytes=4 * WIDTH * 4))
async def test_hops_compute_pieces_of_one_prompt_at_the_same_time(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)
    session, oracle = scene.open_session(), Oracle()
    await session.step(draw(0))
    oracle.step(draw(0))
    started_at = now()

    assert torch.equal(await session.step(draw(1, 40)), oracle.step(draw(1, 40)))

    # Ten pieces over three hops with a round trip of 0.1 s each: 12 of them, not 30.
    assert now() - started_at == pytest.approx(1.2, abs=0.05)


@pytest.mark.parametrize(
    ("weights", "configured", "expected"),
    [
        (["fp32", "fp32"], "auto", torch.float32),
        (["fp32", "int8"], "auto", torch.bfloat16),
        (["fp32", "fp32"], "fp16", torch.float16),
    ],
)
async def test_wire_dtype_follows_the_peers_unless_it_is_set(
    weights: list[str], configured: str, expected: torch.dtype
) -> None:
    async def test(scene: SessionScene) -> None:
        first = await scene.add("a", 0, 3, weights=weights[0])
        await scene.add("b", 3, 6, weights=weights[1])
        session = scene.open_session()

        output = await session.step(draw(1, 3))

        assert output.dtype == expected
        assert from_wire(first.steps[0].hidden).dtype == expected
        assert torch.equal(output.float(), Oracle().step(draw(1, 3)))

    await run(test, config=replace(CONFIG, wire_dtype=configured))


@pytest.mark.parametrize(
    ("versions", "expected"),
    [((3, 3), WireDtype.INT8), ((3, 4), WireDtype.INT8), ((3, 2), WireDtype.BF16)],
)
@in_scene(config=replace(CONFIG, wire_dtype="int8", delivery="star"))
async def test_hidden_states_travel_in_int8_where_all_peers_know_it(
    scene: SessionScene, versions: tuple[int, int], expected: WireDtype
) -> None:
    first = await scene.add("a", 0, 3, weights="int8", max_version=versions[0])
    await scene.add("b", 3, 6, weights="int8", max_version=versions[1])

    await scene.open_session().step(draw(1, 3))

    assert first.opens[0].dtype is first.steps[0].hidden.dtype is expected


@in_scene()
async def test_one_peer_may_serve_two_hops_of_a_route(scene: SessionScene) -> None:
    # Slow with all blocks, so that the fast one is used where it can be.
    slow = await scene.add("slow", 0, 6, decode_steps_per_second=0.5)
    await scene.add("fast", 2, 4, decode_steps_per_second=1e5)
    session, oracle = scene.open_session(), Oracle()

    assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
    assert scene.names_of(session) == ["slow", "fast", "slow"]
    scene.network.kill("fast")
    assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))

    assert scene.names_of(session) == ["slow", "slow", "slow"]
    assert len({opening.session for opening in slow.opens}) == 3


@pytest.mark.slow
async def test_random_life_of_a_session_equals_one_machine() -> None:
    """Steps, rollbacks, row maps, kills, pauses and newcomers, in any order."""
    for seed in range(5):
        print(f"seed {seed}")
        rng = random.Random(seed)

        async def test(scene: SessionScene, rng: random.Random = rng) -> None:
            await add_two_rows_of_peers(scene)
            session, oracle = scene.open_session(200), Oracle()
            num_rows = rng.choice((1, 3))
            for index in range(40):
                if rng.random() < 0.15:
                    position = rng.randint(0, session.position)
                    session.rollback(position)
                    oracle.position = position
                if session.hops and rng.random() < 0.2:
                    victim = scene.peer_of(session, rng.randrange(len(session.hops)))
                    getattr(scene.network, rng.choice(("kill", "pause")))(victim.name)
                    span = victim.span
                    await scene.add(f"{victim.name}-{index}", span.start, span.stop)
                hidden = draw(rng.randrange(1000), rng.choice((1, 1, 1, 4)), num_rows)
                row_map = None
                if rng.random() < 0.3:
                    row_map = tuple(rng.randrange(num_rows) for _ in range(num_rows))
                output = await session.step(hidden, row_map)
                assert torch.equal(output, oracle.step(hidden, row_map)), (rng, index)

        await run(test, config=replace(CONFIG, max_step_bytes=3 * WIDTH * 4 * 3))


@in_scene()
async def test_epochs_and_sequences_grow_and_ids_are_apart(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)
    session, oracle = scene.open_session(), Oracle()
    for index in range(6):
        if index in (2, 4):
            scene.network.kill(scene.peer_of(session, index // 2).name)
        assert torch.equal(await session.step(draw(index)), oracle.step(draw(index)))

    peers = scene.peers.values()
    ids = [opening.session for peer in peers for opening in peer.opens]
    assert len(ids) == len(set(ids)) == 5
    assert SECRET not in ids
    assert sorted(opening.epoch for peer in peers for opening in peer.opens) == [1, 1, 1, 2, 3]
    for peer in peers:
        epochs = [step.epoch for step in peer.steps]
        sequences = [step.sequence for step in peer.steps]
        assert epochs == sorted(epochs)
        assert sequences == sorted(set(sequences))


@in_scene(Link(delay_seconds=0.02))
async def test_sessions_side_by_side_do_not_meet(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)

    async def live(number: int) -> None:
        session, oracle = scene.open_session(secret=SessionId(bytes([number]) * 16)), Oracle()
        for index in range(10):
            hidden = draw(100 * number + index, 1 + number % 3)
            assert torch.equal(await session.step(hidden), oracle.step(hidden))

    lives = asyncio.gather(*(live(number) for number in range(12)))
    await asyncio.sleep(0.3)
    scene.network.kill("b1")
    scene.network.pause("c2")
    await lives


@in_scene()
async def test_closing_frees_every_peer_and_ends_the_session(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)
    session = scene.open_session()
    await session.step(draw(1, 3))
    assert sum(len(peer.caches) for peer in scene.peers.values()) == 3

    await session.close()
    await session.close()
    await asyncio.sleep(1)

    assert sum(len(peer.caches) for peer in scene.peers.values()) == 0
    assert session.hops == ()
    with pytest.raises(UsageError, match="closed"):
        await session.step(draw(2))


@in_scene(Link(delay_seconds=0.05, loss_fraction=0.1))
async def test_link_with_losses_and_delay_changes_nothing(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)
    session, oracle = scene.open_session(), Oracle()
    for index in range(30):
        try:
            output = await session.step(draw(index))
        except UnavailableError:
            output = await session.step(draw(index))
        assert torch.equal(output, oracle.step(draw(index)))
