"""What a client is told by its user: refused in one sentence when it cannot be."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from shoal.client.model.auto import AutoDistributedModelForCausalLM
from shoal.client.routing.route_finder import SwarmModel
from shoal.client.runtime.client import Client, find_network
from shoal.client.settings.client_config import ClientConfig
from shoal.protocol.errors import DirectoryError, UsageError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.limits import MAX_SESSION_TOKENS
from shoal.protocol.membership.join_code import JoinCode
from shoal.protocol.membership.membership import make_owner
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dht.known_addresses import AddressFolder
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.memory.memory_network import MemoryNetwork
from shoal.protocol.spans import Span

SPAN = Span(0, 4)
MODEL = SwarmModel(ModelId("a" * 32), len(SPAN), 64)


def connect(config: ClientConfig | None = None) -> MemoryNetwork:
    return MemoryNetwork(LoopbackNetwork(), MemoryDirectoryStore(), SystemClock(), "us")


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of a swarm without peers."""
    with Client.join(ClientConfig(), connect(), SystemClock(), MODEL) as client:
        yield client


def test_blocks_that_nobody_serves_are_known_without_asking(client: Client) -> None:
    assert client.view.gaps == (SPAN,)


@pytest.mark.parametrize("max_length", ["x", "8", 7.5, None, True, 0, -1])
def test_session_of_an_impossible_length_is_refused(client: Client, max_length: Any) -> None:
    with pytest.raises(UsageError, match=r"max_length|at least one token"):
        client.open_session(max_length, SPAN)


@pytest.mark.parametrize("max_length", [MAX_SESSION_TOKENS + 1, 10**12, 2**70])
def test_session_longer_than_any_may_be_is_refused(client: Client, max_length: int) -> None:
    with pytest.raises(UsageError, match=f"at most {MAX_SESSION_TOKENS} tokens"):
        client.open_session(max_length, SPAN)


def test_closed_session_cannot_be_rolled_back(client: Client) -> None:
    session = client.open_session(8, SPAN)
    session.close()

    with pytest.raises(UsageError, match="the session is closed; open a new one"):
        session.position = 0


@pytest.mark.parametrize("max_length", [8, numpy.int64(8), torch.tensor(8)])
def test_length_of_a_session_may_come_from_any_library(client: Client, max_length: Any) -> None:
    position: Any = numpy.int64(0)
    with client.open_session(max_length, SPAN) as session:
        assert session.max_length == 8
        session.position = position


@pytest.mark.parametrize("position", ["x", "0", 0.0, None, False, 1, -1])
def test_impossible_position_is_refused_and_changes_nothing(client: Client, position: Any) -> None:
    with client.open_session(8, SPAN) as session:
        with pytest.raises(UsageError, match="position"):
            session.position = position

        assert session.position == 0


@pytest.mark.parametrize("initial_peers", [5, [5], b"/ip4/...", {"/ip4/..."}, 0.5])
def test_initial_peers_that_are_no_addresses_are_refused(
    tmp_path: Path, initial_peers: Any
) -> None:
    with pytest.raises(UsageError, match="initial_peers must be addresses"):
        AutoDistributedModelForCausalLM.from_pretrained(tmp_path, initial_peers=initial_peers)


def test_network_without_initial_peers_says_how_to_give_them() -> None:
    with pytest.raises(UsageError, match=r"initial_peers=\[\.\.\.\]"):
        find_network(ClientConfig())


def test_code_without_an_address_finds_its_swarm_where_this_machine_met_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    owner = make_owner(bytes(range(16)))
    config = ClientConfig(join=str(JoinCode(owner)))
    with pytest.raises(UsageError, match=r"has not met its swarm yet.*initial_peers="):
        find_network(config)
    known = AddressFolder().find(owner, ())
    assert known is not None
    address = f"/ip4/192.0.2.1/tcp/4001/p2p/{Identity(bytes(32)).peer_id}"
    known.save(owner.swarm_id, [PeerAddress.parse(address)])

    network: Any = find_network(config)

    assert tuple(network.initial_peers) == (address,)


def test_one_initial_peer_needs_no_list(tiny_models: Any) -> None:
    seen: list[ClientConfig] = []

    def listen(config: ClientConfig) -> MemoryNetwork:
        seen.append(config)
        return connect(config)

    model = tiny_models.get().directory
    AutoDistributedModelForCausalLM.from_pretrained(
        model, initial_peers="/ip4/...", connect=listen
    ).close()

    assert seen[0].initial_peers == ("/ip4/...",)


@pytest.mark.parametrize("num_failures", [1, 2])
def test_joining_is_tried_twice(num_failures: int) -> None:
    attempts: list[int] = []

    class FailingNetwork(MemoryNetwork):
        async def connect(self) -> tuple[LoopbackTransport, MemoryDirectory]:
            attempts.append(len(attempts) + 1)
            if attempts[-1] <= num_failures:
                raise DirectoryError(f"nobody answers attempt {attempts[-1]}")
            return await super().connect()

    network = FailingNetwork(LoopbackNetwork(), MemoryDirectoryStore(), SystemClock(), "us")

    expected = (
        nullcontext() if num_failures == 1 else pytest.raises(DirectoryError, match="attempt 2")
    )
    with expected as failed:
        Client.join(ClientConfig(), network, SystemClock(), MODEL).close()

    assert attempts == [1, 2]
    if failed is not None:
        shown = traceback.format_exception(failed.value)
        assert len(shown) == 4, "the title, the call, where it is raised, and what it says"
