"""Who serves what, as scripts of PETALS ask for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tuning_scene import REPLICAS, assert_close, open_model

from shoal.client import (
    UID_DELIMITER,
    AutoDistributedConfig,
    AutoDistributedModelForCausalLM,
    ClientConfig,
    InferenceSession,
    RemoteSequenceManager,
    RemoteSequential,
    RouteError,
    UsageError,
)
from shoal.client.routing.route import Fault
from shoal.peer.local_swarm.loopback import LoopbackSwarm


class Swarms:
    """A swarm for each client, always with the same peers."""

    def __init__(self, directory: Any) -> None:
        self._directory = directory
        self._newest: LoopbackSwarm | None = None

    def connect(self, config: object) -> Any:
        self._newest = LoopbackSwarm(self._directory, REPLICAS, weights="fp32")
        return self._newest.connect(config)

    @property
    def known(self) -> list[str]:
        assert self._newest is not None
        return [peer.peer_id for peer in self._newest.peers]

    def pick(self, *numbers: int) -> set[str]:
        return {self.known[number] for number in numbers}


@pytest.fixture
def swarms(tiny_models: Any) -> Swarms:
    return Swarms(tiny_models.get().directory)


@pytest.fixture
def config(tiny_models: Any, swarms: Swarms) -> Any:
    directory = tiny_models.get().directory
    return AutoDistributedConfig.from_pretrained(directory, connect=swarms.connect, seed=3)


@pytest.fixture
def blocks(config: Any) -> Iterator[RemoteSequential]:
    with RemoteSequential(config, start_block=1, end_block=4) as blocks:
        yield blocks


def test_sequence_is_a_route_of_now(blocks: RemoteSequential, swarms: Swarms) -> None:
    manager = blocks.sequence_manager

    for mode in ("min_latency", "max_throughput"):
        first, second = manager.make_sequence(mode=mode, cache_tokens_needed=64)
        assert (first.start, first.end, first.length) == (0, 1, 1)
        assert (second.start, second.end, second.length) == (1, 3, 2)
        assert first.peer_id in swarms.pick(0, 1)
        assert second.peer_id in swarms.pick(2, 3)
    (last,) = manager.make_sequence(2, mode="min_latency")
    assert (last.start, last.end, last.state) == (2, 3, "online")
    assert manager.make_sequence(1, 1) == []
    with pytest.raises(UsageError, match="min_latency, max_throughput"):
        manager.make_sequence(mode="fastest")


def test_state_says_who_serves_each_block(blocks: RemoteSequential, swarms: Swarms) -> None:
    info = blocks.sequence_manager.state.sequence_info

    assert len(info) == len(blocks) == 3
    assert info.block_uids == blocks.sequence_manager.block_uids
    served = [set(block.servers) for block in info.block_infos]
    assert served == [swarms.pick(0, 1), *[swarms.pick(2, 3)] * 2]
    assert [span.length for span in info.spans_by_priority] == [2, 2, 1, 1]
    assert [{span.peer_id for span in spans} for spans in info.spans_containing_block] == served
    (server, _) = info.block_infos[0].servers.values()
    assert (server.start_block, server.end_block, server.quant_type) == (0, 2, "fp32")


def test_peers_that_failed_are_avoided(blocks: RemoteSequential) -> None:
    manager = blocks.sequence_manager
    peer = manager.make_sequence()[1]
    book = manager.client.swarm.book
    book.quarantine(
        next(one for one in book.view.peers if one.peer_id == peer.peer_id), Fault.SILENT
    )
    assert manager.state.banned_peers == {peer.peer_id}
    assert manager.make_sequence()[1].peer_id != peer.peer_id


def test_parts_of_a_sequence_are_those_of_the_blocks(blocks: RemoteSequential) -> None:
    manager = blocks.sequence_manager

    assert manager[1:].block_uids == blocks[1:].sequence_manager.block_uids
    assert manager[-1].block_uids == (manager.block_uids[-1],)
    assert len(manager[:2]) == 2
    with pytest.raises(IndexError):
        _ = manager[3]


def test_first_peer_says_what_room_it_has(blocks: RemoteSequential) -> None:
    manager = blocks.sequence_manager
    manager.state.rpc_info = None  # as scripts do that want it anew

    assert manager.rpc_info["cache_tokens_available"] > 0
    assert manager.rpc_info["version"].startswith("shoal")


def test_blocks_are_made_of_a_sequence(config: Any) -> None:
    names = [f"{config.dht_prefix}{UID_DELIMITER}{block}" for block in range(2, 4)]
    hidden = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1))

    manager = RemoteSequenceManager(config, names, dht=None)
    blocks = RemoteSequential(config, sequence_manager=manager)
    found = blocks(inputs=hidden)
    with RemoteSequential(config, dht=None) as all_blocks:
        assert_close(found, all_blocks[2:4](hidden))

    assert blocks.sequence_manager is manager
    assert manager.block_uids == tuple(names)
    assert manager.config is config
    with pytest.raises(UsageError, match="leave out start"):
        RemoteSequential(config, sequence_manager=manager, start_block=1)
    assert manager.is_alive()
    manager.shutdown()
    assert not manager.is_alive()


class OwnManager(RemoteSequenceManager):
    """Says that it was shut down, as one of PETALS's own tests does."""

    def __init__(self, *arguments: Any, told: list[str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._told = told

    def shutdown(self) -> None:
        super().shutdown()
        self._told.append("shut down")


class CompressingManager(OwnManager):
    @property
    def rpc_info(self) -> Any:
        return {**super().rpc_info, "compression": "fp16"}

    def get_request_metadata(self, protocol: str) -> Any:
        raise AssertionError


def test_given_sequence_is_shut_down_with_its_blocks(config: Any) -> None:
    told: list[str] = []
    names = [f"{config.dht_prefix}{UID_DELIMITER}0"]
    with RemoteSequential(config, sequence_manager=OwnManager(config, names, told=told)) as blocks:
        assert isinstance(blocks.sequence_manager, OwnManager)
        assert isinstance(blocks[0].sequence_manager, OwnManager)
        assert not told
    assert told == ["shut down"]


def test_overrides_that_nothing_calls_are_warned_of(config: Any) -> None:
    manager = CompressingManager(config, [f"{config.dht_prefix}{UID_DELIMITER}0"], told=[])
    with pytest.warns(
        UserWarning, match="calls get_request_metadata, rpc_info of CompressingManager"
    ) as warned:
        RemoteSequential(config, sequence_manager=manager)
    assert warned[0].filename == __file__
    manager.shutdown()


def test_session_is_opened_over_a_sequence(blocks: RemoteSequential) -> None:
    hidden = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(1))
    with InferenceSession(blocks.sequence_manager, max_length=3) as session:
        assert session.max_length == 3
        assert_close(session.step(hidden), blocks(hidden))


def test_blocks_are_joined_with_the_configuration_of_a_model(
    tiny_models: Any, swarms: Swarms
) -> None:
    directory = tiny_models.get().directory
    hidden = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(1))
    with AutoDistributedModelForCausalLM.from_pretrained(
        directory, connect=swarms.connect, wire_dtype="fp32"
    ) as model:
        with RemoteSequential(model.config, start_block=1) as blocks:
            assert_close(blocks(hidden), model.transformer.h[1:](hidden))
            assert blocks.sequence_manager.client.config.wire_dtype == "fp32"
        assert model.transformer.h.sequence_manager.is_alive()
        with pytest.raises(UsageError, match="or the config of an open model, not LlamaConfig"):
            RemoteSequential(copy.copy(model.config))


def test_blocks_are_joined_through_the_peers_of_a_dht(tiny_models: Any, swarms: Swarms) -> None:
    joined: list[tuple[str, ...]] = []

    def connect(client: ClientConfig) -> Any:
        joined.append(client.initial_peers)
        return swarms.connect(client)

    config = AutoDistributedConfig.from_pretrained(tiny_models.get().directory, connect=connect)
    dht = SimpleNamespace(initial_peers=["/ip4/127.0.0.1/tcp/1"])
    RemoteSequential(config, dht=dht).close()
    assert config.initial_peers == ()
    config.initial_peers = "/ip4/127.0.0.1/tcp/2"
    RemoteSequenceManager(config, [f"{config.dht_prefix}.0"], dht=dht).shutdown()

    assert joined == [("/ip4/127.0.0.1/tcp/1",), ("/ip4/127.0.0.1/tcp/2",)]


@pytest.mark.parametrize("blocks", [[], [1, 3], [3, 4], [2, 1]])
def test_names_that_are_no_blocks_in_a_row_are_refused(config: Any, blocks: list[int]) -> None:
    names = [f"{config.dht_prefix}{UID_DELIMITER}{block}" for block in blocks]

    with pytest.raises(UsageError, match="consecutive blocks"):
        RemoteSequenceManager(config, names)


def test_model_has_a_sequence_too(tiny_models: Any) -> None:
    with open_model(tiny_models.get(), REPLICAS) as model:
        manager = model.transformer.h.sequence_manager

        assert manager.config is model.config
        assert manager.block_uids[0] == f"{model.config.dht_prefix}{UID_DELIMITER}0"
        assert len(manager.make_sequence()) == 2


def test_only_the_peers_of_a_list_are_used(config: Any, swarms: Swarms) -> None:
    with RemoteSequential(config):
        known = swarms.known
    config.allowed_servers = [known[0], known[2], known[3]]
    config.blocked_servers = known[3:]
    assert config.client.allowed_servers == (known[0], known[2], known[3])

    hidden = torch.zeros(1, 3, 64)
    with RemoteSequential(config) as blocks, blocks.inference_session(max_length=3) as session:
        session.step(hidden)
        assert [hop.peer.peer_id for hop in session.hops] == [known[0], known[2]]
        with blocks.use_session(None):
            blocks(hidden)
        assert {hop.peer.peer_id for hop in blocks.take_recent_hops()} == {known[0], known[2]}

    config.blocked_servers = known[2:]
    with RemoteSequential(config) as blocks:
        manager = blocks.sequence_manager
        manager.update(wait=True)
        assert not manager.state.sequence_info.block_infos[2].servers
        with pytest.raises(RouteError, match="2:4"):
            manager.make_sequence()


def test_model_shows_the_swarm_as_it_is_now(tiny_models: Any) -> None:
    with open_model(tiny_models.get(), REPLICAS) as model:
        known = model.view_swarm()
        view = model.view_swarm()

    assert sorted((peer.span.start, peer.span.stop) for peer in view.online) == [*REPLICAS]
    assert view.taken_at > known.taken_at
