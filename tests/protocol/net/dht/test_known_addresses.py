"""What is kept on disk of the addresses of a swarm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from announcements import identity_of
from virtual_time import VirtualClock

from shoal.protocol.membership.membership import Membership, Role, begin_public, make_owner
from shoal.protocol.net.dht import known_addresses
from shoal.protocol.net.dht.internet import InternetNetwork, Listening
from shoal.protocol.net.dht.known_addresses import AddressFolder, KnownAddresses
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress

OWNER = make_owner(bytes(range(16)))


def address_of(number: int, host: str = "192.0.2.7") -> PeerAddress:
    return PeerAddress.parse(f"/ip4/{host}/tcp/{4000 + number}/p2p/{identity_of(number).peer_id}")


def find(
    folder: AddressFolder, membership: Membership | None, initial_peers: list[str]
) -> KnownAddresses:
    known = folder.find(membership, initial_peers)
    assert known is not None
    return known


def test_addresses_are_found_again_by_whoever_joins_the_same_swarm(tmp_path: Path) -> None:
    folder = AddressFolder(tmp_path / "shoal" / "swarms")
    addresses = [address_of(1), address_of(2)]

    find(folder, OWNER.as_role(Role.SERVE), ["/ip4/any"]).save(OWNER.swarm_id, addresses)
    find(folder, None, ["/ip4/b", "/ip4/a"]).save(OWNER.swarm_id, addresses[:1])

    assert find(folder, OWNER, []).load() == (OWNER.swarm_id, addresses)
    assert find(folder, None, ["/ip4/a", "/ip4/b"]).load()[1] == addresses[:1]
    assert find(folder, None, ["/ip4/a"]).load() == (b"", [])


def test_swarm_of_the_last_time_is_told_by_those_on_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = AddressFolder(tmp_path)
    assert folder.find_last() == ([], 0.0)
    for number, at in ((1, 2000.0), (2, 3000.0), (3, 1000.0)):
        addresses = [address_of(number, host) for host in ("192.0.2.7", "10.0.0.2", "127.0.0.1")]
        find(folder, OWNER, []).save(OWNER.swarm_id, addresses)
        (path,) = (file for file in tmp_path.iterdir() if not file.name.startswith("swarm"))
        path.rename(tmp_path / f"swarm {number}")
        os.utime(tmp_path / f"swarm {number}", (at, at))
    monkeypatch.setattr(known_addresses, "list_own_hosts", lambda _: ["10.0.0.2"])

    assert folder.find_last() == ([address_of(2)], 3000.0)


@pytest.mark.parametrize(("listen_host", "is_kept"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_first_peer_keeps_the_addresses_of_its_swarm_unless_that_is_local(
    listen_host: str, is_kept: bool, tmp_path: Path
) -> None:
    listening, folder = Listening(listen_host), AddressFolder(tmp_path)
    network = InternetNetwork(VirtualClock(), listening=listening, folder=folder)
    begun = begin_public(identity_of(1).peer_id)

    known = network._find_known(identity_of(1))

    assert (known is not None) is is_kept
    if known is not None:
        known.save(begun.swarm_id, [address_of(2)])
        assert find(folder, begun, [address_of(2).text]).load()[1] == [address_of(2)]


@pytest.mark.parametrize(("joined_through", "num_kept"), [("127.0.0.1", 2), ("192.0.2.7", 1)])
def test_loopback_is_kept_where_it_is_joined_through(
    joined_through: str, num_kept: int, tmp_path: Path
) -> None:
    addresses = [address_of(1), address_of(2, "127.0.0.1")]
    known = find(AddressFolder(tmp_path), OWNER, [address_of(3, joined_through).text])

    known.save(OWNER.swarm_id, addresses)

    assert known.load()[1] == addresses[:num_kept]


@pytest.mark.parametrize("initial_peers", [[], [address_of(3, "127.0.0.1").text]])
def test_nothing_is_kept_of_a_demo(initial_peers: list[str], tmp_path: Path) -> None:
    assert AddressFolder(tmp_path).find(None, initial_peers) is None


def test_nothing_is_not_kept(tmp_path: Path) -> None:
    known = find(AddressFolder(tmp_path), OWNER, [address_of(3).text])
    known.save(OWNER.swarm_id, [address_of(1), address_of(2, "127.0.0.1")])

    known.save(OWNER.swarm_id, [address_of(2, "127.0.0.1")])

    assert known.load() == (OWNER.swarm_id, [address_of(1)])


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    known = find(AddressFolder(tmp_path), OWNER, [])

    known.save(OWNER.swarm_id, [address_of(number) for number in range(1, 100)])

    assert known.load()[1] == [address_of(number) for number in range(1, 33)]


def test_address_of_a_peer_is_kept_once_and_the_first_one_counts(tmp_path: Path) -> None:
    known = find(AddressFolder(tmp_path), OWNER, [])

    known.save(OWNER.swarm_id, [address_of(2), address_of(1), address_of(2, "192.0.2.8")])

    assert known.load()[1] == [address_of(2), address_of(1)]


def test_swarms_of_long_ago_are_forgotten(tmp_path: Path) -> None:
    folder = AddressFolder(tmp_path)
    for number in range(70):
        find(folder, None, [str(number)]).save(OWNER.swarm_id, [address_of(1)])
        for age, file in enumerate(
            sorted(tmp_path.iterdir(), key=lambda one: -os.stat(one).st_mtime)
        ):
            os.utime(file, (1e9 - age, 1e9 - age))

    assert len(list(tmp_path.iterdir())) == 64
    assert find(folder, None, ["69"]).load()[1] != []


@pytest.mark.parametrize(
    "content", [b"junk", b"\xff\xfe", b"00\n", b"00\n/ip4/1/tcp/1/p2p/x\n", b""]
)
def test_damaged_file_holds_nothing(content: bytes, tmp_path: Path) -> None:
    folder = AddressFolder(tmp_path)
    find(folder, OWNER, []).save(OWNER.swarm_id, [address_of(1)])
    (file,) = tmp_path.iterdir()

    file.write_bytes(content)

    assert find(folder, OWNER, []).load() == (b"", [])


def test_no_place_to_write_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    known = find(AddressFolder(tmp_path / "file"), OWNER, [])

    known.save(OWNER.swarm_id, [address_of(1)])

    assert known.load() == (b"", [])
    assert "cannot keep the addresses" in caplog.text


def test_loopback_that_another_process_kept_is_not_dialled_from_elsewhere(tmp_path: Path) -> None:
    folder, address = AddressFolder(tmp_path), address_of(1, "127.0.0.1")
    here = find(folder, OWNER, [address.text])
    here.save(OWNER.swarm_id, [address])

    assert find(folder, OWNER, [address_of(2).text]).load()[1] == []
    assert here.load()[1] == [address]
