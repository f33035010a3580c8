"""What a client has published and withdraws: who was not told of that is told later."""

from __future__ import annotations

import asyncio

import pytest
from pass_peers import WHOLE, add_pass_peer, move_pass_peer
from publisher_scene import LARGE, SECONDS, make_version, name_of, run_publisher
from session_scene import Scene, now

from shoal.client.passes.pass_asking import PassAsker
from shoal.client.publishing import keeper_calls
from shoal.client.publishing.publisher import Publisher
from shoal.client.routing.route import Hop
from shoal.protocol.errors import UsageError
from shoal.protocol.net.clock import VirtualClock
from shoal.protocol.net.memory.loopback import Link
from shoal.protocol.records.announcements import PeerState
from shoal.protocol.spans import Span
from shoal.protocol.versions import OPTIMIZER_VERSION


@pytest.mark.parametrize("seconds", [1.0, 4 * SECONDS])
def test_state_before_the_newest_may_be_withdrawn_at_all_peers(seconds: float) -> None:
    """However long ago it was replaced: whoever publishes it may have used it since."""

    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, old, new = await add_pass_peer(scene, 1.0), make_version(8), make_version(10)
        await publisher.publish(old, WHOLE, "a")
        await publisher.publish(new, WHOLE, "a")
        await asyncio.sleep(seconds)
        later = await add_pass_peer(scene, 1.0)

        assert await publisher.withdraw(name_of(old)) == 0
        assert peer.withdrawn == later.withdrawn == [name_of(old)]
        assert await publisher.withdraw(name_of(old)) == 0
        assert peer.withdrawn == later.withdrawn == [name_of(old)]

    run_publisher(test)


def test_another_adapter_cannot_be_withdrawn() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        await add_pass_peer(scene, 1.0)
        await publisher.publish(make_version(8), WHOLE, "a")
        with pytest.raises(UsageError, match="was not published here"):
            await publisher.withdraw(name_of(make_version(10)))

    run_publisher(test)


def test_peers_that_do_not_answer_keep_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        await add_pass_peer(scene, 1.0)
        await publisher.publish(make_version(8), WHOLE, "a")
        scene.network.pause("pass1")
        began_at = now()
        await publisher.close()
        assert now() - began_at <= 3.0
        assert "that an adapter is withdrawn (1 could not)" in caplog.text
        scene.network.resume("pass1")

    run_publisher(test)


def test_peer_that_was_silent_once_is_told() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        silent, sound = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        version = make_version(8)
        await publisher.publish(version, WHOLE, "a")
        silent.is_mute = True
        await asyncio.sleep(SECONDS + 30.0)
        silent.is_mute = False
        await publisher.withdraw(name_of(version))
        assert silent.withdrawn == sound.withdrawn == [name_of(version)]

    run_publisher(test)


@pytest.mark.parametrize("ends_by", ["silence", "interruption"])
@pytest.mark.parametrize("repeats_by", ["withdraw", "close"])
def test_withdrawal_that_failed_may_be_repeated(ends_by: str, repeats_by: str) -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        silent, sound = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        version = make_version(8)
        await publisher.publish(version, WHOLE, "a")
        silent.is_mute = True
        withdrawing = asyncio.create_task(publisher.withdraw(name_of(version)))
        await asyncio.sleep(1.0)
        if ends_by == "interruption":
            withdrawing.cancel()
            await asyncio.wait([withdrawing])
        else:
            assert await withdrawing == 1
        assert (silent.withdrawn, sound.withdrawn) == ([], [name_of(version)])

        silent.is_mute = False
        if repeats_by == "withdraw":
            assert await publisher.withdraw(name_of(version)) == 0
            assert await publisher.withdraw(name_of(version)) == 0
        await publisher.close()
        assert silent.withdrawn == sound.withdrawn == [name_of(version)]

    run_publisher(test)


def test_what_was_withdrawn_may_be_published_again_before_all_are_told() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        silent, sound = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        version = make_version(8)
        await publisher.publish(version, WHOLE, "a")
        silent.is_mute = True
        withdrawing = asyncio.create_task(publisher.withdraw(name_of(version)))
        await asyncio.sleep(1.0)
        await publisher.publish(version, WHOLE, "a")
        silent.is_mute = False
        assert await withdrawing == 1
        await asyncio.sleep(SECONDS)
        assert silent.published.keys() == sound.published.keys() == {name_of(version)}

    run_publisher(test)


def test_what_is_published_while_it_is_withdrawn_is_brought_after_that() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        await publisher.publish(version, WHOLE, "a")
        (announced,) = await asker.list_peers()
        async with asker.lend(Hop(announced, announced.span)):  # so that a stream has to be dialled
            withdrawing = asyncio.create_task(publisher.withdraw(name_of(version)))
            await asyncio.sleep(0.1)
        await publisher.publish(version, WHOLE, "a")
        assert await withdrawing == 0
        assert peer.published.keys() == {name_of(version)}

    run_publisher(test, Link(delay_seconds=0.4))


def test_who_got_an_adapter_that_was_interrupted_is_told_at_the_end() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        silent, sound = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        version = make_version(8)
        silent.is_mute = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await publisher.publish(version, WHOLE, "a")
        await asyncio.sleep(SECONDS)
        assert len(sound.brought) == 1  # nobody has learned its digest

        await publisher.close()
        assert sound.withdrawn == [name_of(version)]

    run_publisher(test)


def test_all_is_withdrawn_from_the_newest_on_whoever_is_silent() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        silent, sound = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        versions = [make_version(size) for size in (8, 10, 12)]
        for number, version in enumerate(versions):
            await publisher.publish(version, WHOLE, str(number))
        silent.is_mute = True
        began_at = now()
        await publisher.close()

        assert now() - began_at <= 3.0
        assert sound.withdrawn == [name_of(version) for version in reversed(versions)]

    run_publisher(test)


def test_many_adapters_are_withdrawn_in_one_round_trip() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer = await add_pass_peer(scene, 1.0)
        for number in range(12):
            await publisher.publish(make_version(8 + 2 * number), WHOLE, str(number))
        await asyncio.sleep(20.0)
        began_at = now()
        await publisher.close()
        assert now() - began_at <= 2.0
        assert len(peer.withdrawn) == 12

    run_publisher(test, Link(delay_seconds=0.2))


def test_process_that_stood_still_hears_the_answers_to_a_withdrawal() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        await add_pass_peer(scene, 1.0)
        version = make_version(8)
        await publisher.publish(version, WHOLE, "a")
        withdrawing = asyncio.create_task(publisher.withdraw(name_of(version)))
        await asyncio.sleep(0.5)
        VirtualClock().stall(100.0)
        assert await withdrawing == 0

    run_publisher(test, Link(delay_seconds=0.4))


def test_withdrawal_ends_what_is_under_way_and_tells_that_peer() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        slow, sound = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        slow.piece_seconds, version = 0.3, make_version(LARGE)
        await publisher.publish(version, WHOLE, "a")
        assert await publisher.withdraw(name_of(version)) == 0
        assert slow.withdrawn == sound.withdrawn == [name_of(version)]
        assert "0 in use" in repr(asker)

        await asyncio.sleep(2 * SECONDS)
        assert slow.published == sound.published == {}
        assert len(slow.brought) == len(sound.brought) == 1

    run_publisher(test)


def test_renewal_that_a_withdrawal_overtakes_brings_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        await publisher.publish(version, WHOLE, "a")
        peer.is_mute = True
        await asyncio.sleep(101.0)
        assert len(peer.brought) == 2
        peer.is_mute = False
        await publisher.withdraw(name_of(version))
        await asyncio.sleep(SECONDS)
        assert (len(peer.brought), peer.num_pieces) == (2, 1)

    run_publisher(test)
    assert caplog.text == ""


def test_withdrawal_does_not_wait_for_passes() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        await publisher.publish(version, WHOLE, "a")
        (announced,) = await asker.list_peers()
        hop = Hop(announced, announced.span)
        async with asker.lend(hop), asker.lend(hop):
            assert await publisher.withdraw(name_of(version)) == 0
        assert peer.withdrawn == [name_of(version)]

    run_publisher(test)


def test_older_peer_is_not_asked_to_forget_an_adapter(caplog: pytest.LogCaptureFixture) -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        older = await add_pass_peer(scene, 1.0, max_version=OPTIMIZER_VERSION - 1)
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        await publisher.publish(version, WHOLE, "a")
        assert await publisher.withdraw(name_of(version)) == 1
        assert await publisher.withdraw(name_of(version)) == 0
        assert (older.withdrawn, peer.withdrawn) == ([], [name_of(version)])

    run_publisher(test)
    assert caplog.text.count("that an adapter is withdrawn (1 could not)") == 1


def test_peer_that_moved_is_told_where_it_is_now() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        await publisher.publish(version, WHOLE, "a")
        await asyncio.sleep(1.0)
        await move_pass_peer(scene, peer, "pass1")
        assert await publisher.withdraw(name_of(version)) == 0
        assert peer.withdrawn == [name_of(version)]

    run_publisher(test)


@pytest.mark.parametrize("what", ["left", "took other blocks"])
def test_peer_that_has_no_adapters_any_more_counts_as_told(what: str) -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        await publisher.publish(version, WHOLE, "a")
        await asyncio.sleep(20.0)
        if what == "left":
            await scene.announce_peer(peer, state=PeerState.OFFLINE)
            scene.network.kill("pass1")
        else:
            peer.span = Span(0, 1)
        assert await publisher.withdraw(name_of(version)) == 0
        assert peer.withdrawn == []

    run_publisher(test)


def test_withdrawal_waits_for_what_the_line_has_to_carry_before() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        await publisher.publish(version, WHOLE, "a")
        scene.network.pause("pass1")
        withdrawn_after = asyncio.get_running_loop().call_later(8.0, scene.network.resume, "pass1")
        with asker.line.carry(2**22):  # for which the line needs 16 seconds
            assert await publisher.withdraw(name_of(version)) == 0
        assert now() >= withdrawn_after.when()
        assert peer.withdrawn == [name_of(version)]

    run_publisher(test)


def test_withdrawal_waits_for_what_it_has_ended_itself() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        slow, sound = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        slow.piece_seconds, version = 1.0, make_version(LARGE)
        await publisher.publish(version, WHOLE, "a")
        scene.network.pause("pass2")
        asyncio.get_running_loop().call_later(4.5, scene.network.resume, "pass2")
        assert await publisher.withdraw(name_of(version)) == 0
        assert sound.withdrawn == [name_of(version)]

    run_publisher(test)


def test_a_few_of_many_peers_hear_of_a_withdrawal_at_once() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peers = [await add_pass_peer(scene, 1.0) for _ in range(40)]
        version = make_version(8)
        await publisher.publish(version, WHOLE, "a")
        for peer in peers:
            peer.is_mute = True
        withdrawing = asyncio.create_task(publisher.withdraw(name_of(version)))
        await asyncio.sleep(1.0)
        assert "32 in use" in repr(asker)
        for peer in peers:
            peer.is_mute = False
        assert await withdrawing == 32

    run_publisher(test)


def test_crowd_that_does_not_answer_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_calls, "_WITHDRAWALS_AT_ONCE", 2)

    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        await add_pass_peer(scene, 1.0)
        crowd = [await add_pass_peer(scene, 1.0) for _ in range(30)]
        for peer in crowd:
            peer.is_mute = True
        await publisher.publish(make_version(8), WHOLE, "a")
        await asyncio.sleep(90.0)
        later = await add_pass_peer(scene, 1.0)
        await asyncio.sleep(60.0)
        assert later.published
        began_at = now()
        assert await publisher.withdraw(name_of(make_version(8))) == 30
        assert now() - began_at < 20.0
        assert len(later.withdrawn) == 1  # before those who have never said a word

    run_publisher(test)


def test_other_adapter_is_published_while_one_is_withdrawn() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        silent, sound = [await add_pass_peer(scene, 1.0) for _ in range(2)]
        one, other = make_version(8), make_version(10)
        await publisher.publish(one, WHOLE, "a")
        silent.is_mute = True
        withdrawing = asyncio.create_task(publisher.withdraw(name_of(one)))
        await asyncio.sleep(0.5)
        publishing = asyncio.create_task(publisher.publish(other, WHOLE, "b"))
        await asyncio.sleep(0.5)
        assert (withdrawing.done(), set(sound.published)) == (False, {name_of(other)})
        assert await withdrawing == 1
        await publishing

    run_publisher(test)


def test_answer_to_another_question_is_none_to_a_withdrawal() -> None:
    async def test(scene: Scene, asker: PassAsker, publisher: Publisher) -> None:
        peer, version = await add_pass_peer(scene, 1.0), make_version(8)
        await publisher.publish(version, WHOLE, "a")
        peer.mixes_up_withdrawals = True
        assert await publisher.withdraw(name_of(version)) == 1

    run_publisher(test)
