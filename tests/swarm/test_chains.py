"""What only chains do: links between peers that fail, logs that are gone, hops lost side by side.

What comes out is always what one engine computes undisturbed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from memory_swarm import look_into
from story_outputs import assert_same

from shoal.protocol.fair_share import SharedBytes
from shoal.protocol.net.memory.loopback import Link

FOUR_HOPS = ((0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4))
BROKEN = Link(loss_fraction=1.0)


@pytest.fixture(params=["chain"])
def delivery(request: pytest.FixtureRequest) -> str:
    return request.param


def count_steps_of_the_client(world: Any) -> list[str]:
    """Return, as they come, the hosts that the client itself sends steps to."""
    sent_to: list[str] = []
    for peer in world.loopback.peers:
        honest = peer.network.serve_stream

        async def serve(stream: Any, peer: Any = peer, honest: Any = honest) -> None:
            if stream.remote_host == "client":
                receive = stream.receive

                async def listen() -> Any:
                    frame = await receive()
                    if frame is not None and frame[3] == 5:  # StepKind.STEP
                        sent_to.append(peer.host)
                    return frame

                stream.receive = listen
            await honest(stream)

        peer.network.serve_stream = serve
    return sent_to


def test_client_speaks_to_the_first_hop_only(run_story: Any) -> None:
    async def story(world: Any) -> None:
        sent_to = count_steps_of_the_client(world)
        session, turns = world.open(), world.make_turns()

        outputs = await world.take_all(session, turns)

        assert_same(outputs, world.expect(turns))
        assert set(sent_to) == {world.hosts_of(session)[0]}
        assert len(sent_to) == len(turns)

    run_story(story, spans=FOUR_HOPS)


@pytest.mark.parametrize("num_turns_before", [0, 3])
@pytest.mark.parametrize("hop", [0, 1, 2])
def test_client_carries_what_two_peers_cannot(
    run_story: Any, hop: int, num_turns_before: int
) -> None:
    """One hop cannot reach the next while both live: no hop is replaced, no cache is lost."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        before: list[str] = [f"peer{n}" for n in range(4)]
        outputs = await world.take_all(session, turns[:num_turns_before])
        sent_to = count_steps_of_the_client(world)

        world.network.set_link(before[hop], before[hop + 1], BROKEN)
        outputs += await world.take_all(session, turns[num_turns_before:])

        assert_same(outputs, world.expect(turns))
        assert world.hosts_of(session) == before
        assert session.failovers == []
        assert world.quarantined_hosts == set()
        assert set(sent_to) <= {before[0], before[hop + 1]}

    run_story(story, spans=FOUR_HOPS[::2])


@pytest.mark.parametrize("prompt_tokens", [5, 300])
@pytest.mark.parametrize("hop", [0, 1, 2])
def test_prompt_is_carried_whole_where_only_its_last_token_is_wanted(
    run_story: Any, hop: int, prompt_tokens: int
) -> None:
    """The hop before the broken link was to be followed by others, and now answers itself."""

    async def story(world: Any) -> None:
        session, turns = world.open(400), world.make_turns(prompt_tokens=prompt_tokens)
        before: list[str] = [f"peer{n}" for n in range(4)]
        world.network.set_link(before[hop], before[hop + 1], BROKEN)

        first = await session.step(turns[0].hidden_BTH, last_token_only=True)
        outputs = [first, *await world.take_all(session, turns[1:])]

        expected = world.expect(turns, max_tokens=400)
        assert_same(outputs, [expected[0][:, -1:], *expected[1:]])
        assert world.hosts_of(session) == before
        assert session.failovers == []
        assert world.quarantined_hosts == set()

    run_story(story, spans=FOUR_HOPS[::2])


@pytest.mark.parametrize("hop", [1, 2, 3])
def test_tokens_are_sent_through_everything_where_no_log_is_left(run_story: Any, hop: int) -> None:
    async def story(world: Any) -> None:
        for peer in world.loopback.peers:
            service = look_into(peer)
            service.pushing = replace(service.pushing, logged=SharedBytes(0))
        session, turns = world.open(), world.make_turns(num_rows=2, num_decoded=6)
        turns[2] = replace(turns[2], row_map=(1, 0))
        turns[4] = replace(turns[4], row_map=(0, 0))
        outputs = await world.take_all(session, turns[:4])
        before = world.hosts_of(session)

        world.network.kill(before[hop])
        outputs += await world.take_all(session, turns[4:])

        assert_same(outputs, world.expect(turns))
        assert before[hop] not in world.hosts_of(session)

    run_story(story, spans=FOUR_HOPS)


@pytest.mark.parametrize("hop", [0, 1, 2])
def test_hop_behind_a_carried_link_is_lost(run_story: Any, hop: int) -> None:
    """What it was pushed before the link failed is in no log of the client's."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=6)
        outputs = await world.take_all(session, turns[:3])
        before = world.hosts_of(session)
        world.network.set_link(before[hop], before[hop + 1], BROKEN)
        outputs += await world.take_all(session, turns[3:5])

        world.network.kill(before[hop + 1])
        outputs += await world.take_all(session, turns[5:])

        assert_same(outputs, world.expect(turns))

    run_story(story, spans=FOUR_HOPS)


@pytest.mark.parametrize("hop", [0, 1, 2, 3])
def test_hop_that_dies_while_pieces_of_a_prompt_are_under_way(run_story: Any, hop: int) -> None:
    async def story(world: Any) -> None:
        turns = world.make_turns(num_decoded=2, prompt_tokens=40)
        warm = world.open()
        await world.take_all(warm, world.make_turns())
        before = world.hosts_of(warm)
        session = world.open()
        peer, num_steps = world.peer_on(before[hop]), 0
        take = look_into(peer).compute.submit

        def submit(work: Any, holder: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 4:
                world.network.kill(before[hop])
            return take(work, holder)

        look_into(peer).compute.submit = submit

        outputs = await world.take_all(session, turns)

        assert_same(outputs, world.expect(turns))
        assert before[hop] not in world.hosts_of(session)

    run_story(story, spans=FOUR_HOPS, max_step_bytes=8 * 64 * 4)


def test_zombie_that_wakes_up_disturbs_nobody(run_story: Any) -> None:
    """A hop stands still with a step in its hands, and pushes it when it was replaced long ago."""

    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_decoded=6)
        outputs = await world.take_all(session, turns[:3])
        zombie = world.hosts_of(session)[1]
        outputs.append(await paused_step(world, session, turns[3], zombie))

        world.network.resume(zombie)
        outputs += await world.take_all(session, turns[4:])

        assert_same(outputs, world.expect(turns))
        assert len(session.failovers) == 1

    run_story(story, spans=FOUR_HOPS)


async def paused_step(world: Any, session: Any, turn: Any, host: str) -> Any:
    """Take a step while a host gets it and can say nothing more."""
    taking = asyncio.create_task(world.take(session, turn))
    service = look_into(world.peer_on(host))
    (held,) = service.sessions.values()
    while held.state.sequence < session.state.last_sequence:  # noqa: ASYNC110 - a few turns
        await asyncio.sleep(0)
    world.network.pause(host)
    return await taking


def test_pieces_of_a_prompt_overlap(run_story: Any) -> None:
    """The first hop has taken all pieces before the last one has answered any."""

    async def story(world: Any) -> None:
        session = world.open()
        (turn,) = world.make_turns(num_decoded=0, prompt_tokens=12)
        order: list[tuple[str, int]] = []
        for peer in world.loopback.peers:
            take, host = look_into(peer).compute.submit, peer.host

            def submit(work: Any, holder: Any, take: Any = take, host: str = host) -> Any:
                order.append((host, work.position))
                return take(work, holder)

            look_into(peer).compute.submit = submit

        await world.take(session, turn)

        first, last = (world.hosts_of(session)[index] for index in (0, -1))
        num_ahead = order.index((last, 0))
        assert [host for host, _ in order[:num_ahead]].count(first) >= 2
        assert [position for host, position in order if host == last] == [0, 4, 8]

    run_story(story, spans=FOUR_HOPS[::2], max_step_bytes=4 * 64 * 4)


def test_more_pieces_are_under_way_than_there_are_hops(run_story: Any) -> None:
    """The first hop has taken four pieces while the second one answers none: lines are long."""

    async def story(world: Any) -> None:
        session = world.open(max_tokens=512)
        (turn,) = world.make_turns(num_decoded=0, prompt_tokens=512)
        first, second = (look_into(peer).compute for peer in world.loopback.peers)
        positions: list[int] = []
        has_all = asyncio.Event()

        def take(work: Any, holder: Any, submit: Any = first.submit) -> Any:
            positions.append(work.position)
            if len(positions) == 4:
                has_all.set()
            return submit(work, holder)

        def take_late(work: Any, holder: Any, submit: Any = second.submit) -> Any:
            async def wait() -> Any:
                await has_all.wait()
                return await submit(work, holder)

            return asyncio.ensure_future(wait())

        first.submit, second.submit = take, take_late
        await world.take(session, turn)

        assert positions == [0, 128, 256, 384]

    run_story(story, spans=((0, 2), (2, 4)), kv_budget_bytes=2**26)
