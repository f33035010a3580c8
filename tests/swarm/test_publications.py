"""Published adapters in swarms of real peers: a few hold them, the others fetch them by digest."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from adapter_scene import assert_close, make_adapter, swarm_of
from adapter_talk import make_leaves
from memory_swarm import MODEL_ID, Inside, look_into
from torch import Tensor
from virtual_swarm import WHOLE, RelayedTransport, VirtualSwarm, run_scene

from shoal.client.publishing.publisher import Publisher
from shoal.client.settings.client_config import ClientConfig
from shoal.peer.engine.adapters.adapter_store import KeptAdapter
from shoal.protocol.errors import RefusedError
from shoal.protocol.fair_share import Tenant
from shoal.protocol.ids import AdapterId, make_client_token
from shoal.protocol.messages.adapters import KEEP_SECONDS
from shoal.protocol.net.memory.loopback import Link
from shoal.protocol.records.announcements import shorten_adapter
from shoal.protocol.spans import Span

USER = Tenant("a user")
TOKENS = torch.arange(40).view(2, 20) % 128
CONFIG = ClientConfig(seed=1)


@asynccontextmanager
async def publishing(scene: VirtualSwarm) -> AsyncGenerator[Publisher]:
    """Be a client for a while; what it has published is withdrawn at the end."""
    async with scene.make_client(RelayedTransport(scene.network, "client")) as client:
        yield client.passes.publisher


def run(tiny_models: Any, story: Callable[[VirtualSwarm], Awaitable[None]]) -> None:
    run_scene(tiny_models.get().directory, CONFIG, story)


def hold(peer: Inside) -> list[AdapterId]:
    """Return which publications a peer holds for others."""
    return peer.adapters.list_held()


async def find(
    peer: Inside, name: AdapterId, seconds: float = 10.0, user: Tenant = USER
) -> KeptAdapter | None:
    """Name an adapter at a peer, again after a while; return it if it is there by then."""
    for _ in range(4):
        with contextlib.suppress(RefusedError):
            return peer.adapters.find(name, user)
        await asyncio.sleep(seconds)
    return None


def list_matrices(kept: KeptAdapter | None) -> dict[str, Tensor]:
    assert kept is not None
    parts = [part for found in kept.adapter.parts.values() for part in found]
    downs = {f"{part.module} down": part.down_RI for part in parts}
    return downs | {f"{part.module} up": part.up_OR for part in parts}


BOTH_HALVES = (Span(0, 2), Span(2, 4))


def test_peer_that_joins_later_fetches_its_own_blocks_and_serves_nobody(tiny_models: Any) -> None:
    leaves = make_leaves(0, 1, 2, 3)
    name = leaves.manifest.name

    async def test(scene: VirtualSwarm) -> None:
        halves = [await scene.add(f"half{n}", span) for n, span in enumerate(BOTH_HALVES)]
        async with publishing(scene) as publisher:
            await publisher.publish(leaves, WHOLE, "a")
            assert [hold(peer) for peer in halves] == [[name], [name]]
            late = await scene.add("late", Span(1, 3))
            whole = await scene.add("whole", WHOLE)
            kept = await find(late, name)
            assert kept is not None
            assert {key[0] for key in kept.adapter.parts} == {1, 2}
            assert kept.tenant == USER
            assert late.adapters.shared.find_share(USER)[0] == kept.num_bytes
            assert hold(late) == []

            everything = list_matrices(await find(whole, name))
            assert len(everything) == 8
            for matrix, tensor in list_matrices(kept).items():
                assert torch.equal(tensor, everything[matrix])
            announced = {
                peer.peer_id: peer.adapters
                for peer in await scene._swarm.open_directory().lookup(MODEL_ID)
            }
            assert [announced[peer.peer_id] for peer in (*halves, late)] == [
                (shorten_adapter(name),), (shorten_adapter(name),), ()
            ]  # fmt: skip

    run(tiny_models, test)


def test_peer_whose_blocks_an_adapter_does_not_change_learns_its_name(tiny_models: Any) -> None:
    leaves = make_leaves(0, 1)

    async def test(scene: VirtualSwarm) -> None:
        first, second = [await scene.add(f"half{n}", s) for n, s in enumerate(BOTH_HALVES)]
        async with publishing(scene) as publisher:
            await publisher.publish(leaves, WHOLE, "a")
            assert (len(hold(first)), len(hold(second))) == (1, 0)
            kept = await find(second, leaves.manifest.name)
            assert kept is not None
            assert not kept.adapter.parts

    run(tiny_models, test)


def test_each_block_has_two_holders_and_a_lost_one_is_replaced(tiny_models: Any) -> None:
    leaves = make_leaves(0, 1, 2, 3)
    name = leaves.manifest.name

    async def test(scene: VirtualSwarm) -> None:
        peers = {f"peer{n}": await scene.add(f"peer{n}") for n in range(4)}
        async with publishing(scene) as publisher:
            await publisher.publish(leaves, WHOLE, "a")
            holders = [host for host, peer in peers.items() if hold(peer)]
            assert len(holders) == 2
            others = [host for host in peers if host not in holders]
            scene.network.pause(holders[0])
            assert await find(peers[others[0]], name, 40.0)

            await asyncio.sleep(2 * KEEP_SECONDS)
            alive = [host for host, peer in peers.items() if hold(peer)]
            assert len(set(alive) - {holders[0]}) == 2

    run(tiny_models, test)


def test_peer_that_fetched_it_for_its_publisher_becomes_a_holder(tiny_models: Any) -> None:
    leaves = make_leaves(0, 1, 2, 3)
    name = leaves.manifest.name

    async def test(scene: VirtualSwarm) -> None:
        peers = {f"peer{n}": await scene.add(f"peer{n}") for n in range(3)}
        async with publishing(scene) as publisher:
            await publisher.publish(leaves, WHOLE, "a")
            (other,) = [peer for peer in peers.values() if not hold(peer)]
            token = make_client_token(bytes(16), other.peer_id).hex()
            assert await find(other, name, user=Tenant("client", token))
            lost = next(host for host, peer in peers.items() if hold(peer))
            scene.network.pause(lost)
            await asyncio.sleep(KEEP_SECONDS)
            assert hold(other) == [name]

    run(tiny_models, test)


def test_wrong_bytes_are_refused_by_digest_and_another_holder_is_asked(tiny_models: Any) -> None:
    leaves = make_leaves(0, 1, 2, 3)
    name = leaves.manifest.name

    async def test(scene: VirtualSwarm) -> None:
        peers = [await scene.add(f"peer{n}") for n in range(3)]
        async with publishing(scene) as publisher:
            await publisher.publish(leaves, WHOLE, "a")
            liar, honest = [peer for peer in peers if hold(peer)]
            (victim,) = [peer for peer in peers if not hold(peer)]
            for number in (0, 2):
                liar.adapters.find_held(name, USER).files[number][-1] ^= 1
            expected = list_matrices(honest.adapters.find(name, USER))
            found = list_matrices(await find(victim, name, 30.0))
            assert all(torch.equal(found[matrix], expected[matrix]) for matrix in expected)

            for peer in (liar, honest):
                peer.adapters.find_held(name, USER).files[0][-1] ^= 3
            late = await scene.add("late")
            assert await find(late, name) is None
            assert late.adapters.shared.used_bytes == 0

    run(tiny_models, test)


def test_withdrawal_reaches_copies_within_a_minute(tiny_models: Any) -> None:
    leaves = make_leaves(0, 1, 2, 3)
    name = leaves.manifest.name

    async def test(scene: VirtualSwarm) -> None:
        peers = [await scene.add(f"peer{n}") for n in range(3)]
        async with publishing(scene) as publisher:
            await publisher.publish(leaves, WHOLE, "a")
            assert all([await find(peer, name) for peer in peers])
            assert await publisher.withdraw(name) == 0
            assert [len(hold(peer)) for peer in peers] == [0, 0, 0]
            await asyncio.sleep(65.0)
            assert [len(peer.adapters) for peer in peers] == [0, 0, 0]
            assert await find(peers[0], name) is None

    run(tiny_models, test)


def test_publication_is_kept_while_it_is_renewed_and_expires_with_its_publisher(
    tiny_models: Any,
) -> None:
    leaves = make_leaves(0, 1, 2, 3)
    name = leaves.manifest.name

    async def test(scene: VirtualSwarm) -> None:
        peers = [await scene.add(f"peer{n}") for n in range(3)]
        async with publishing(scene) as publisher:
            await publisher.publish(leaves, WHOLE, "a")
            for _ in range(10):
                await asyncio.sleep(KEEP_SECONDS / 2)
                assert all([await find(peer, name) for peer in peers])
            scene.network.pause("client")
            gone_at = asyncio.get_running_loop().time()
            while any(len(peer.adapters) for peer in peers):
                await asyncio.sleep(5.0)
                for peer in peers:
                    await find(peer, name, 0.1)
            assert asyncio.get_running_loop().time() - gone_at < 1.1 * KEEP_SECONDS
            scene.network.resume("client")

    run(tiny_models, test)


def test_peer_that_others_reach_over_a_relay_only_is_a_holder_where_there_is_no_other(
    tiny_models: Any,
) -> None:
    leaves = make_leaves(0, 1, 2, 3)

    async def test(scene: VirtualSwarm) -> None:
        relayed = await scene.add("relayed", is_relayed=True)
        dialable = [await scene.add(f"peer{n}") for n in range(2)]
        async with publishing(scene) as publisher:
            await publisher.publish(leaves, WHOLE, "a")
            assert hold(relayed) == []
            assert all(hold(peer) for peer in dialable)
            assert await find(relayed, leaves.manifest.name)  # it can dial

    run(tiny_models, test)


def test_adapter_that_nobody_holds_is_refused_after_the_last_attempt(tiny_models: Any) -> None:
    async def test(scene: VirtualSwarm) -> None:
        peer = await scene.add("peer")
        name = AdapterId(bytes(32))
        for seconds in (1.0, None):
            with pytest.raises(RefusedError) as refusal:
                peer.adapters.find(name, USER)
            assert refusal.value.retry_after_seconds == seconds
            await asyncio.sleep(5.0)

    run(tiny_models, test)


def test_stranger_who_names_many_digests_makes_a_peer_fetch_few(tiny_models: Any) -> None:
    async def test(scene: VirtualSwarm) -> None:
        peer = await scene.add("peer")
        names = [AdapterId(number.to_bytes(32, "big")) for number in range(1000)]
        for name in names:
            with pytest.raises(RefusedError):
                peer.adapters.find(name, USER)
        assert len(asyncio.all_tasks()) < 50
        await asyncio.sleep(60.0)
        assert peer.adapters.shared.used_bytes == 0

    run(tiny_models, test)


@pytest.mark.slow
def test_client_uses_a_published_adapter_at_a_peer_that_does_not_hold_it(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ((0, 4),) * 3) as (swarm, model), torch.no_grad():
        adapter = make_adapter(model)
        expected = model(TOKENS, active_adapter=adapter).logits
        digest = model.publish_adapter(adapter)
        for peer in swarm.peers:
            if hold(look_into(peer)):
                swarm.network.set_link("client", peer.host, Link(loss_fraction=1.0))
        with model.use_adapter(digest):
            assert_close(model(TOKENS).logits, expected)
            text = model.generate(TOKENS[:1], max_new_tokens=8, do_sample=False)
        with model.use_adapter(adapter):
            other = model.generate(TOKENS[:1], max_new_tokens=8, do_sample=False)
        assert isinstance(text, Tensor)
        assert isinstance(other, Tensor)
        assert torch.equal(text, other)
        assert sum(bool(hold(look_into(peer))) for peer in swarm.peers) == 2
