"""The doctor's checks, over a network in memory on the virtual clock."""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from diagnosis_scene import ADDRESS, Swarm, examine, find

from shoal.client.doctor.finding import FindingStatus
from shoal.protocol.errors import DirectoryError, P2pdEndedError, WrongSwarmError
from shoal.protocol.membership.membership import Membership, Role, make_owner
from shoal.protocol.records.announcements import PeerState
from shoal.protocol.spans import Span

REFUSED = ConnectionRefusedError(111, "refused")
UNKNOWN_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
SEVERAL = "Multiple exceptions: [Errno 111] refused, [Errno 113] no route"


def test_sound_swarm_is_well() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 4))
        await swarm.add(Span(4, 8))
        await swarm.add(Span(4, 8))

    diagnosis = examine(build)

    assert diagnosis.is_well
    assert diagnosis.is_usable
    assert [finding.name.split()[0] for finding in diagnosis.findings] == [
        *("model", "address", "directory", "announcements"),
        *("peer", "peer", "peer", "clocks", "blocks"),
    ]
    assert all(finding.fix == "" for finding in diagnosis.findings)
    assert [check.rtt_seconds for check in diagnosis.checks] == [pytest.approx(0.1)] * 3
    # The time the answer travelled is not taken for a wrong clock.
    assert [check.clock_ahead_seconds for check in diagnosis.checks] == [
        pytest.approx(0.0, abs=1e-5)
    ] * 3


def test_missing_model_still_lets_the_network_be_checked() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8))

    diagnosis = examine(build, model=None)

    assert not diagnosis.is_well
    assert find(diagnosis, "model").detail == "there is no model here"
    assert find(diagnosis, "directory").ok


def trouble(**facts: Any) -> Callable[[Swarm], Awaitable[None]]:
    """Return what has a swarm without peers be as these attributes say."""

    async def build(swarm: Swarm) -> None:
        for name, value in facts.items():
            setattr(swarm, name, value)

    return build


@pytest.mark.parametrize(
    ("facts", "detail", "fix"),
    [
        ({"dial_error": REFUSED}, "nobody listens", ""),
        ({"dial_error": UNKNOWN_NAME}, "the host name cannot be resolved", "spelling of the name"),
        ({"dial_error": UnicodeError()}, "the host name cannot be resolved", "spelling"),
        ({"dial_error": OSError(SEVERAL)}, ": refused, no route", ""),
        ({"is_dial_silent": True}, "no answer within 3 s", "forward TCP port 4001"),
        (
            {"dial_error": OSError(errno.ENETUNREACH, "unreachable")},
            "unreachable",
            "of this machine",
        ),
        ({"hail_answer": None}, "accepts connections and then stays silent", "kill -CONT"),
        ({"hail_answer": b""}, "does not speak libp2p", ""),
        ({"hail_answer": b"HTTP/1.1 400 Bad Request"}, "does not speak libp2p", ""),
    ],
    ids=[
        *("closed", "unknown name", "impossible name", "several failures"),
        *("silent", "no network", "paused", "hangs up", "another program"),
    ],
)
def test_address_that_cannot_be_joined_through_is_told(
    facts: dict[str, Any], detail: str, fix: str
) -> None:
    diagnosis = examine(trouble(**facts, join_error=DirectoryError("nobody can be reached")))

    finding = find(diagnosis, "address")
    assert not finding.ok
    assert "10.0.0.1:4001" in finding.detail
    assert detail in finding.detail
    assert "Errno" not in finding.detail
    assert fix in finding.fix
    assert diagnosis.missing is None
    assert len(diagnosis.findings) == 2  # nobody is left to join through


def test_swarm_that_is_found_again_at_no_address_that_was_given_is_examined() -> None:
    """As a client would find it: at addresses of the last time."""

    async def build(swarm: Swarm) -> None:
        swarm.dial_error = REFUSED
        await swarm.add(Span(0, 8))

    diagnosis = examine(build)

    assert not find(diagnosis, "address").ok
    assert find(diagnosis, "directory").ok
    assert diagnosis.is_usable


@pytest.mark.parametrize(
    ("error", "name", "fix"),
    [
        (DirectoryError("no initial peer answers: /ip4/..."), "directory", "paused"),
        (DirectoryError("it is not the peer that the address names"), "directory", "--identity"),
        (DirectoryError("it is in flames"), "directory", "the same only with --identity FILE"),
        (P2pdEndedError("p2pd on this machine ended"), "p2pd", "free memory on this machine"),
        (DirectoryError("the clock of this machine is 9 s ahead"), "clock", "time synchronisation"),
        (WrongSwarmError("different swarms; give one"), "membership", "addresses of one swarm"),
        (WrongSwarmError("wrong secret: another swarm"), "membership", "for a join code"),
        (WrongSwarmError("not a member: it is private"), "membership", "for a join code"),
    ],
    ids=str,
)
def test_advice_fits_the_failure_of_the_join(error: DirectoryError, name: str, fix: str) -> None:
    diagnosis = examine(trouble(join_error=error))

    finding = find(diagnosis, name)
    assert not finding.ok
    assert str(error) in finding.detail
    assert fix in finding.fix
    assert not diagnosis.is_usable


def test_directory_that_cannot_be_read_is_reported() -> None:
    async def build(swarm: Swarm) -> None:
        swarm.store.is_reachable = False

    diagnosis = examine(build)

    assert "reading failed" in find(diagnosis, "directory").detail


def test_nobody_online_is_said_with_those_who_left() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8), state=PeerState.OFFLINE)

    diagnosis = examine(build)

    assert "1 offline" in find(diagnosis, "announcements").detail
    assert diagnosis.missing == (Span(0, 8),)
    assert not diagnosis.checks


@pytest.mark.parametrize(
    ("membership", "way_in", "takes_another_code"),
    [
        (None, " --initial-peers /ip4/a", False),
        (make_owner(bytes(16)).as_role(Role.SERVE), " --join @serve.code", False),
        (make_owner(bytes(16)).as_role(Role.SERVE), "", False),
        (make_owner(bytes(16)).as_role(Role.USE), " --join CODE", True),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_somebody_online", [False, True])
def test_peers_to_start_are_told_how_they_get_in(
    membership: Membership | None,
    way_in: str,
    takes_another_code: bool,
    is_somebody_online: bool,
) -> None:
    async def build(swarm: Swarm) -> None:
        swarm.membership = membership
        swarm.way_in = "--join @use.code" if takes_another_code else way_in.strip()
        if is_somebody_online:
            await swarm.add(Span(0, 4), membership=membership)

    finding = find(examine(build), "blocks" if is_somebody_online else "announcements")

    blocks = " --blocks 4:8" * is_somebody_online
    assert f"`shoal serve 'my stories'{blocks}{way_in}`" in finding.fix
    assert ("that allows serving" in finding.fix) == takes_another_code


@pytest.mark.parametrize(
    ("host", "error", "words"),
    [
        ("9.9.9.9", TimeoutError(), "a firewall or router there blocks TCP port 4001"),
        ("9.9.9.9", REFUSED, ""),
        ("10.0.0.1", TimeoutError(), "from outside that network, its owner has to forward TCP"),
        ("127.0.0.1", REFUSED, "use a code of a peer started without --local"),
    ],
)
def test_address_that_cannot_be_dialled_is_called_what_it_is(
    host: str, error: OSError, words: str
) -> None:
    build = trouble(dial_error=error)

    fix = find(examine(build, addresses=[ADDRESS.replace("10.0.0.1", host)]), "address").fix

    assert "still runs" in fix
    assert words in fix
    assert ("firewall" in fix) == ("firewall" in words)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", "an address of the machine of the peer itself"),
        ("192.168.1.5", "an address of a local network"),
        ("8.8.8.8", ""),
    ],
)
@pytest.mark.parametrize("error", [None, REFUSED])
def test_address_that_means_nothing_elsewhere_is_called_that(
    host: str, words: str, error: OSError | None
) -> None:
    address = ADDRESS.replace("10.0.0.1", host)

    detail = find(examine(trouble(dial_error=error), addresses=[address]), "address").detail

    assert words in detail
    assert ("which others cannot reach" in detail) is bool(words)


def test_one_of_several_addresses_of_a_peer_will_do() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8))
        swarm.refusing_hosts = {"10.0.0.1"}

    both = examine(build, addresses=[ADDRESS, ADDRESS.replace("10.0.0.1", "8.8.8.8")])
    only = examine(build, addresses=[ADDRESS])

    assert both.is_well
    assert both.findings[1].status is FindingStatus.WARNING
    assert not both.findings[1].fix
    assert find(only, "address").status is FindingStatus.BROKEN
