"""The DHT with real processes: joining it, sharing it, and a dishonest node in it."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import warm_python
from announcements import MODEL, identity_of, make_announcement, sign
from directory_processes import CLOCK, Directories, announce_now, intrude, look_up, sign_now, start
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from processes import children_of, is_running
from swarm_values import make_values

from shoal.protocol.errors import (
    DirectoryError,
    NobodyAnswersError,
    UnavailableError,
    UsageError,
    WrongSwarmError,
)
from shoal.protocol.ids import MODEL_ID_CHARACTERS
from shoal.protocol.membership.membership import Membership, Role, make_owner, make_public
from shoal.protocol.messages.codec import check_kind, decode_frame, encode_frame
from shoal.protocol.messages.records import RecordFetch, Records
from shoal.protocol.net.dht.dht_node import make_node_id
from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory
from shoal.protocol.net.dht.known_addresses import AddressFolder, KnownAddresses
from shoal.protocol.net.libp2p import p2p_daemon
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress, split_multiaddr
from shoal.protocol.net.tcp.dial_rules import DialRules
from shoal.protocol.records.swarm_records import SwarmRecords

pytestmark = pytest.mark.network
OWNER = make_owner(bytes(range(16)))


async def test_node_has_the_peer_id_of_its_identity_and_leaves_no_key_behind(
    dht: Directories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    directory = await dht.join([], 7)
    (address,) = directory.addresses
    (p2pd,) = children_of(os.getpid())
    await directory.close()

    assert address.startswith("/ip4/127.0.0.1/tcp/")
    assert address.endswith(f"/p2p/{identity_of(7).peer_id}")
    assert not is_running(p2pd)
    assert os.listdir(tmp_path) == []


async def test_reader_neither_listens_nor_announces(dht: Directories) -> None:
    server = await dht.join()
    reader = await dht.read(server.addresses)

    assert not reader.addresses
    with pytest.raises(UsageError, match="only reads"):
        await reader.announce(sign_now(1))


async def test_cancelled_join_leaves_no_process(dht: Directories) -> None:
    for delay_seconds in (0, 0.02, 0.05):  # while it is forked, starts and says hello
        joining = asyncio.create_task(dht.join())
        while not children_of(os.getpid()):  # noqa: ASYNC110 - a process sets no event
            await asyncio.sleep(0)
        await asyncio.sleep(delay_seconds)

        joining.cancel()
        try:
            directory = await joining
        except asyncio.CancelledError:
            pass
        else:
            assert delay_seconds  # it was quicker than that
            await directory.close()

        assert children_of(os.getpid()) == []


async def test_join_names_the_addresses_that_do_not_answer(dht: Directories) -> None:
    peer_id = identity_of(1).peer_id

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        busy = silent.getsockname()[1]
        refused, mute = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id}" for port in (1, busy))

        with pytest.raises(NobodyAnswersError, match=refused):
            await dht.join([refused])
        with pytest.raises(DirectoryError, match=mute):
            await dht.join([refused, mute])

        with pytest.raises(UsageError, match="in use"):
            await dht.join(port=busy)

    assert children_of(os.getpid()) == []


async def test_failed_start_waits_for_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch, dht: Directories
) -> None:
    """Else its exit may come when the event loop that would read it is gone."""
    last_words = "import os, time; print('no', flush=True); os.close(1); os.close(2); time.sleep(1)"

    def start_another(*_: object, **__: object) -> list[str]:
        return [sys.executable, "-c", last_words]

    monkeypatch.setattr(p2p_daemon.OwnGroupP2P, "_make_process_args", start_another)

    with pytest.raises(DirectoryError, match="cannot start p2pd"):
        await dht.join()
    assert children_of(os.getpid()) == []


@pytest.mark.parametrize(
    ("initial_peers", "options"),
    [
        (["127.0.0.1:4001"], {}),
        (["/ip4/127.0.0.1/tcp/4001"], {}),
        (["/ip4/127.0.0.1/tcp/4001/p2p/nobody"], {}),
        ([], {"listen_host": "example.org"}),
    ],
)
async def test_impossible_join_is_a_usage_error(
    initial_peers: list[str], options: dict[str, Any], dht: Directories
) -> None:
    with pytest.raises(UsageError):
        await dht.join(initial_peers, **options)


def test_join_says_how_far_the_clock_is_off(peers: contextlib.ExitStack) -> None:
    first = start(peers, 1)
    # hivemind reads its process's clock, so only a process whose clock is off can show this.
    code = (
        "import asyncio, time, hivemind.dht.protocol as protocol\n"
        "from shoal.protocol.net.clock import SystemClock\n"
        "from shoal.protocol.net.dht.hivemind_directory import DirectoryError, HivemindDirectory\n"
        "for offset in (36000, -36000):\n"
        "    protocol.get_dht_time = lambda: time.time() + offset\n"
        "    try:\n"
        "        asyncio.run(HivemindDirectory.join(\n"
        f"            [{first.address!r}], identity=None, clock=SystemClock()))\n"
        "    except DirectoryError as error:\n"
        "        print(error)\n"
    )

    ahead, behind = warm_python.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True
    ).stdout.splitlines()

    for message in (ahead, behind):
        seconds = float(message.removeprefix("the clock of this machine is ").split()[0])
        assert round(seconds / 3600) == 10  # however long the two took to talk
    assert "seconds ahead of" in ahead
    assert "seconds behind" in behind


async def test_public_swarms_in_one_dht_do_not_mix(dht: Directories) -> None:
    first = await dht.join([], 1)
    second = await dht.join([], 2)
    await intrude(second, first.addresses)
    for number, directory in ((1, first), (2, second)):
        await directory.announce(sign_now(number))
    reader = await dht.read(second.addresses)

    assert await look_up(first) == {identity_of(1).peer_id}
    assert await look_up(second) == await look_up(reader) == {identity_of(2).peer_id}
    with pytest.raises(WrongSwarmError, match="wrong swarm"):
        await dht.join(first.addresses, membership=second.membership)


async def test_outsider_in_the_dht_of_a_private_swarm_finds_nobody_and_is_not_found(
    dht: Directories,
) -> None:
    first = await dht.join([], 1, membership=OWNER.as_role(Role.SERVE))
    outsider = await dht.join([], 3)
    await intrude(outsider, first.addresses)
    await first.announce(sign_now(1))
    await outsider.announce(sign_now(3))

    user = await dht.read(first.addresses, membership=OWNER.as_role(Role.USE))

    assert await look_up(user) == {identity_of(1).peer_id}
    assert await look_up(outsider) == {identity_of(3).peer_id}


async def test_newcomer_joins_through_whoever_of_some_addresses_is_left(dht: Directories) -> None:
    first = await dht.join([], 1)
    second = await dht.join(first.addresses, 2)
    await second.announce(sign_now(2))
    await first.close()

    third = await dht.join([*first.addresses, *second.addresses], 3)

    assert await look_up(third) == {identity_of(2).peer_id}


def find_kept(folder: Path, membership: Membership) -> KnownAddresses:
    known = AddressFolder(folder).find(membership, [])
    assert known is not None
    return known


async def test_restart_needs_no_initial_peer_that_still_lives(
    dht: Directories, tmp_path: Path
) -> None:
    known = find_kept(tmp_path, OWNER)
    options = {"membership": OWNER.as_role(Role.SERVE), "known": known}
    first = await dht.join([], 1, membership=OWNER.as_role(Role.SERVE))
    others = {number: await dht.join(first.addresses, number, **options) for number in (2, 3)}
    await announce_all(others)
    assert await look_up(others[3]) == {identity_of(number).peer_id for number in (2, 3)}
    for gone in (first, others[3]):
        await gone.close()

    again = await dht.join(first.addresses, 3, **options)

    assert identity_of(2).peer_id in await look_up(again)
    stranger = {"membership": make_owner(bytes(16)).as_role(Role.USE), "known": known}
    with pytest.raises(WrongSwarmError):
        await dht.read(others[2].addresses, **stranger)


async def test_newcomer_is_kept_by_a_peer_that_looks_nobody_up(
    dht: Directories, tmp_path: Path
) -> None:
    """It may be killed as soon as it has announced again."""
    membership = OWNER.as_role(Role.SERVE)
    known = find_kept(tmp_path, OWNER)
    first = await dht.join([], 1, membership=membership, known=known)
    newcomer = await dht.join(first.addresses, 2, membership=membership)
    await announce_all({2: newcomer})

    await announce_all({1: first})

    assert identity_of(2).peer_id in {one.peer_id for one in known.load()[1]}


async def test_those_met_last_are_kept_when_leaving(dht: Directories, tmp_path: Path) -> None:
    membership = OWNER.as_role(Role.SERVE)
    known = find_kept(tmp_path, OWNER)
    first = await dht.join([], 1, membership=membership)
    await announce_all({1: first})
    reader = await dht.read(first.addresses, membership=membership, known=known)
    await reader.lookup(MODEL)
    assert {one.peer_id for one in known.load()[1]} == {identity_of(1).peer_id}
    second = await dht.join(first.addresses, 2, membership=membership)
    await announce_all({2: second})
    await reader.lookup(MODEL)  # too soon after the first time

    await reader.close()

    numbers = (1, 2)
    assert {one.peer_id for one in known.load()[1]} == {identity_of(n).peer_id for n in numbers}


async def test_peer_that_was_moved_does_not_take_who_is_there_now_for_itself(
    dht: Directories, tmp_path: Path
) -> None:
    known = find_kept(tmp_path, OWNER)
    membership = OWNER.as_role(Role.SERVE)
    living = await dht.join([], 1, membership=membership)
    (text,) = living.addresses
    there = text.removesuffix(str(identity_of(1).peer_id)) + identity_of(2).peer_id
    known.save(OWNER.swarm_id, [PeerAddress.parse(address) for address in (there, text)])
    nowhere = f"/ip4/127.0.0.1/tcp/9/p2p/{identity_of(3).peer_id}"

    again = await dht.join([nowhere], 2, membership=membership, known=known)

    assert again.membership == membership


async def test_restart_joins_no_other_swarm_whatever_addresses_strangers_had_announced(
    dht: Directories, tmp_path: Path
) -> None:
    """Those who listen there are in another swarm, or none that can be joined."""
    first = await dht.join([], 1)
    honest = await dht.join(first.addresses, 2)
    liar = await dht.join([], 3)
    known = find_kept(tmp_path, first.membership)
    liars, honests = ([PeerAddress.parse(text) for text in one.addresses] for one in (liar, honest))
    await first.close()

    known.save(first.membership.swarm_id, [*liars, *honests])
    again = await dht.join(first.addresses, 4, known=known)
    assert again.membership == first.membership
    known.save(first.membership.swarm_id, liars)
    with pytest.raises(NobodyAnswersError, match=re.escape(first.addresses[0])):
        await dht.join(first.addresses, 5, known=known)


async def test_addresses_of_the_last_time_give_way_to_new_ones(
    dht: Directories, tmp_path: Path
) -> None:
    """31 of 32 are of peers that are gone."""
    first = await dht.join([], 1)
    honest = await dht.join(first.addresses, 2)
    gone = [f"/ip4/127.0.0.1/tcp/{n}/p2p/{identity_of(n).peer_id}" for n in range(100, 131)]
    known = find_kept(tmp_path, first.membership)
    kept = [PeerAddress.parse(text) for text in (*honest.addresses, *gone)]
    known.save(first.membership.swarm_id, kept)
    newer = await dht.join(first.addresses, 3)
    await first.close()
    await announce_all({3: newer})

    reader = await dht.read(first.addresses, known=known)
    await reader.lookup(MODEL)

    _, addresses = known.load()
    assert len(addresses) == 32
    assert addresses[0].peer_id == identity_of(3).peer_id


async def test_peers_that_hold_are_kept_rather_than_those_that_were_there_earlier(
    dht: Directories, tmp_path: Path
) -> None:
    first = await dht.join([], 1)
    await announce_all({1: first})
    known, then = find_kept(tmp_path, first.membership), CLOCK.wall() - 1000
    reader = await dht.read(first.addresses, known=known)
    for number in range(100, 140):
        gone = sign(make_announcement(number, then, directory_port=number), number)
        reader.records.take(MODEL, reader.records.seal(gone), then)

    await reader.lookup(MODEL)

    _, addresses = known.load()
    assert len(addresses) == 32
    assert addresses[0].peer_id == identity_of(1).peer_id


async def test_peer_that_nobody_has_joined_keeps_the_addresses_of_the_last_time(
    dht: Directories, tmp_path: Path
) -> None:
    membership = OWNER.as_role(Role.SERVE)
    known = find_kept(tmp_path, OWNER)
    kept = PeerAddress.parse(f"/ip4/127.0.0.1/tcp/9/p2p/{identity_of(2).peer_id}")
    known.save(OWNER.swarm_id, [kept])

    first = await dht.join([], 1, membership=membership, known=known)
    await announce_all({1: first})
    await first.close()

    assert known.load()[1] == [kept]


async def test_announced_address_in_a_local_network_is_dialled_from_there_only(
    dht: Directories,
) -> None:
    num_dials = 0

    def count(_: object, writer: asyncio.StreamWriter) -> None:
        nonlocal num_dials
        num_dials += 1
        writer.close()

    async with await asyncio.start_server(count, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        local = await dht.join([], 1)
        rules = DialRules(CLOCK, ["192.0.2.1"])
        public = await dht.join([], 2, rules=rules)
        for number, directory, expected in ((2, public, False), (1, local, True)):
            stranger = SwarmRecords(directory.membership)
            value = stranger.add_own(sign_now(3, directory_port=port), CLOCK.wall()).value
            directory.records.take(MODEL, value, CLOCK.wall())

            with pytest.raises(DirectoryError, match="keeps our announcement"):
                await directory.announce(sign_now(number))

            assert (num_dials > 0) == expected

        rules.move(["127.0.0.1"])
        num_dials = 0
        with pytest.raises(DirectoryError, match="keeps our announcement"):
            await public.announce(sign_now(2))

        assert num_dials > 0


async def test_swarm_stays_whole_when_the_peer_that_began_it_begins_it_again(
    dht: Directories,
) -> None:
    """The others have forgotten it, and know each other; it knows nobody."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    everyone = {identity_of(number).peer_id for number in (1, 2, 3)}

    first = await dht.join([], 1, port=port)
    code = first.membership
    others = {number: await dht.join(first.addresses, number) for number in (2, 3)}
    await announce_all(others)
    await first.close()
    await announce_all(others)

    first = await dht.join([], 1, port=port)
    everywhere = {1: first, **others}
    async with asyncio.timeout(60):
        while any([await look_up(one) != everyone for one in everywhere.values()]):
            await announce_all(everywhere)
            # p2pd tries an address again some seconds after it has failed; peers limit what they
            # are asked until then.
            await asyncio.sleep(0.1)

    assert first.membership == code


async def announce_all(directories: Mapping[int, HivemindDirectory], **changes: Any) -> None:
    for number, directory in directories.items():
        _, port = split_multiaddr(directory.addresses[0])
        await directory.announce(sign_now(number, directory_port=port, **changes))


async def test_dishonest_node_neither_fills_nor_hides_nor_poisons(dht: Directories) -> None:
    """It keeps nothing and answers with junk; that honest nodes are asked as well is enough."""
    honest = await dht.join([], 1)
    liar = await dht.join(honest.addresses, 2)
    lies = make_lies(honest.membership)
    num_asked, is_readable = 0, False

    async def lie(question: bytes, _: object) -> bytes:
        nonlocal num_asked
        num_asked += 1
        content = liar.records.open(question)
        fetch = check_kind(decode_frame(content[MODEL_ID_CHARACTERS:]), RecordFetch, "a node")
        if num_asked % 2 and not is_readable:
            return b"junk"
        return liar.records.seal(encode_frame(Records(fetch.question, tuple(lies), True)))

    handlers: Any = liar._access.p2p._client.control.unary_handlers  # type: ignore[union-attr]
    handlers["shoal.records.2"] = lie
    victim = announce_now(1)
    await honest.announce(sign(victim, 1))
    reader = await dht.read(liar.addresses)

    for _ in range(2):
        assert await reader.lookup(MODEL) == [victim]
        assert await honest.lookup(MODEL) == [victim]
    assert num_asked > 2
    await honest.close()
    is_readable = True  # alone, it can only be silent
    newcomer = await dht.read(liar.addresses, membership=honest.membership)
    assert await newcomer.lookup(MODEL) == []


def make_lies(membership: Membership) -> list[bytes]:
    """Return values that no member takes, and one of a peer that is gone."""
    now = CLOCK.wall()
    ours = SwarmRecords(membership)
    gone = announce_now(3, issued_at=now - 90, expires_at=now - 1)
    value = ours.add_own(sign_now(4, model_id="b" * 32), now).value
    other_swarm = SwarmRecords(make_public(bytes(16))).add_own(sign_now(5), now).value
    return [value, other_swarm, ours.seal(sign(gone, 3)), ours.seal(b"junk"), b"junk"]


async def test_answer_to_an_earlier_question_is_not_believed(dht: Directories) -> None:
    """A node cannot show for ever what it was told once, nor claim to keep what it does not."""
    honest = await dht.join([], 1)
    liar = await dht.join(honest.addresses, 2)
    handlers: Any = liar._access.p2p._client.control.unary_handlers  # type: ignore[union-attr]
    answer = handlers["shoal.records.2"]
    first: list[bytes] = []

    async def repeat_the_first(question: bytes, sender: object) -> bytes:
        first.append(await answer(question, sender))
        return first[0]

    handlers["shoal.records.2"] = repeat_the_first
    fetch = honest.records.make_fetch(MODEL, CLOCK.wall(), Random(0))
    (node,) = await honest._node.neighbourhood.find_nodes("a key")

    assert await honest._node.records._ask(node, MODEL, fetch) is not None
    later = honest.records.make_fetch(MODEL, CLOCK.wall(), Random(0))
    assert await honest._node.records._ask(node, MODEL, later) is None
    assert len(first) == 2


async def test_stranger_without_the_secret_is_told_nothing_and_keeps_nothing(
    dht: Directories,
) -> None:
    """It has a node among those of a private swarm, and asks as members do."""
    member = await dht.join([], 1, membership=OWNER.as_role(Role.SERVE))
    stranger = await dht.join([], 3)
    await intrude(stranger, member.addresses)
    await member.announce(sign_now(1))
    client: Any = stranger._access.p2p._client  # type: ignore[union-attr]
    fetch = stranger.records.make_fetch(MODEL, CLOCK.wall(), Random(0))

    for swarm_id in (stranger.membership.swarm_id, member.membership.swarm_id):
        with pytest.raises(P2PHandlerError):
            await client.call_unary_handler(
                member._access.p2p.peer_id,
                "shoal.records.2",
                swarm_id + MODEL.encode() + encode_frame(fetch),
            )
    await stranger.lookup(MODEL)
    assert stranger.records.list_records(MODEL, CLOCK.wall()) == []
    assert len(stranger.records._book) == 0


@pytest.mark.thorough  # starts 13 p2pds
@pytest.mark.parametrize("are_slow", [False, True], ids=["silent", "slow"])
async def test_made_up_identities_around_a_key_do_not_empty_the_view_of_a_newcomer(
    dht: Directories, are_slow: bool
) -> None:
    """Ten nodes that are nearer than any other answer nothing, or the same again and again just in
    time; the newcomer joins through one.
    """
    honest = await dht.join([], 1)
    key = DHTID.generate(source=f"shoal directory 3\0{honest.membership.swarm_id.hex()}\0{MODEL}")
    silents = [await dht.join(honest.addresses, number) for number in grind_identities(key, 10)]
    lies = tuple(make_values(100, CLOCK.wall(), honest.membership)) if are_slow else ()
    for silent in silents:
        control: Any = silent._access.p2p._client.control  # type: ignore[union-attr]
        control.unary_handlers["shoal.records.2"] = partial(repeat_slowly, silent.records, lies)
    await honest.announce(sign_now(1))

    newcomer = await dht.read(silents[0].addresses)

    assert identity_of(1).peer_id in await look_up(newcomer)


async def repeat_slowly(
    records: SwarmRecords, lies: tuple[bytes, ...], question: bytes, _: object
) -> bytes:
    if not lies:
        raise UnavailableError("nothing")
    content = records.open(question)
    fetch = check_kind(decode_frame(content[MODEL_ID_CHARACTERS:]), RecordFetch, "a node")
    await asyncio.sleep(1.0)  # of the 1.5 s that an answer may take
    return records.seal(encode_frame(Records(fetch.question, lies, True)))


async def test_owner_revokes_nobody_while_nobody_tells_who_is_revoked(dht: Directories) -> None:
    """The list would lack those whom it had before."""
    member = await dht.join([], 1, membership=OWNER.as_role(Role.SERVE))
    owner = await dht.read(member.addresses, membership=OWNER)
    handlers: Any = member._access.p2p._client.control.unary_handlers  # type: ignore[union-attr]
    answer = handlers["shoal.records.2"]

    handlers["shoal.records.2"] = partial(repeat_slowly, member.records, ())
    with pytest.raises(DirectoryError, match="says which peers are revoked so far"):
        await owner.revoke([identity_of(3).peer_id])
    handlers["shoal.records.2"] = answer
    await owner.revoke([identity_of(2).peer_id])

    assert member.records.revocations.peer_ids == {identity_of(2).peer_id}


def grind_identities(key: DHTID, num_identities: int) -> list[int]:
    """Return the numbers of peers, of the first 200, whose nodes are nearest to a key."""

    def find_distance(number: int) -> int:
        peer_id = PeerID.from_base58(identity_of(number).peer_id)
        return int(key) ^ int(make_node_id(peer_id))

    return sorted(range(2, 200), key=find_distance)[:num_identities]
