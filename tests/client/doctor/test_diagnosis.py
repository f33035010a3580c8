"""The doctor's checks, over a network in memory on the virtual clock."""

from __future__ import annotations

import socket

import pytest
from diagnosis_scene import ADDRESS, Swarm, examine, find

from shoal.protocol.errors import DirectoryError, WrongSwarmError
from shoal.protocol.membership.membership import Membership, Role, make_owner, make_public
from shoal.protocol.records.announcements import PeerState
from shoal.protocol.spans import Span


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


def test_closed_address_is_told() -> None:
    async def build(swarm: Swarm) -> None:
        swarm.dial_error = ConnectionRefusedError(111, "refused")

    diagnosis = examine(build)

    closed = find(diagnosis, "address")
    assert "10.0.0.1:4001" in closed.detail
    assert "nobody listens" in closed.detail
    assert not closed.ok
    assert diagnosis.missing is None
    assert len(diagnosis.findings) == 2  # nobody is left to join through


def test_silent_address_is_given_up_in_time() -> None:
    async def build(swarm: Swarm) -> None:
        swarm.is_dial_silent = True

    diagnosis = examine(build)

    assert "does not answer within 3 s" in find(diagnosis, "address").detail
    assert "firewall" in find(diagnosis, "address").fix


def test_address_that_accepts_and_says_nothing_is_called_paused() -> None:
    async def build(swarm: Swarm) -> None:
        swarm.hail_answer = None

    diagnosis = examine(build)

    assert "accepts connections and then stays silent" in find(diagnosis, "address").detail
    assert "kill -CONT" in find(diagnosis, "address").fix
    assert len(diagnosis.findings) == 2  # nobody is left to join through


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request"])
def test_address_of_another_program_is_told(answer: bytes) -> None:
    async def build(swarm: Swarm) -> None:
        swarm.hail_answer = answer

    diagnosis = examine(build)

    assert "does not speak libp2p" in find(diagnosis, "address").detail


@pytest.mark.parametrize(
    ("complaint", "advice"),
    [
        ("no initial peer answers: /ip4/...", "paused"),
        ("whoever is there is not the peer that the address names", "--identity"),
        ("the directory is in flames", "restart the peer at this address"),
    ],
)
def test_advice_fits_the_failure_of_the_join(complaint: str, advice: str) -> None:
    async def build(swarm: Swarm) -> None:
        swarm.join_error = DirectoryError(complaint)

    diagnosis = examine(build)

    assert advice in find(diagnosis, "directory").fix


def test_failed_join_is_reported_and_a_wrong_clock_has_its_own_advice() -> None:
    async def build(swarm: Swarm) -> None:
        swarm.join_error = DirectoryError("the clock of this machine is 9.0 seconds ahead")

    diagnosis = examine(build)

    assert "time synchronisation" in find(diagnosis, "clock").fix
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
    ("membership", "option", "takes_another_code"),
    [
        (None, "--initial-peers …", False),
        (make_public(bytes(16)), "--join CODE", False),
        (make_owner(bytes(16)).as_role(Role.SERVE), "--join CODE", False),
        (make_owner(bytes(16)).as_role(Role.USE), "--join CODE", True),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_somebody_online", [False, True])
def test_peers_to_start_are_told_how_they_get_in(
    membership: Membership | None,
    option: str,
    takes_another_code: bool,
    is_somebody_online: bool,
) -> None:
    async def build(swarm: Swarm) -> None:
        swarm.membership = membership
        if is_somebody_online:
            await swarm.add(Span(0, 4), membership=membership)

    finding = find(examine(build), "blocks" if is_somebody_online else "announcements")

    assert f"shoal serve stories {'--blocks 4:8 ' * is_somebody_online}{option}`" in finding.fix
    assert ("that allows serving" in finding.fix) == takes_another_code


def test_unknown_name_is_told_from_a_closed_port_and_without_numbers() -> None:
    async def build(swarm: Swarm) -> None:
        swarm.dial_error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    finding = find(examine(build), "address")

    assert "the host name cannot be resolved" in finding.detail
    assert "Errno" not in finding.detail
    assert "the spelling of the name" in finding.fix


def test_name_that_cannot_be_is_told_like_an_unknown_one() -> None:
    async def build(swarm: Swarm) -> None:
        swarm.dial_error = UnicodeError("label empty or too long")

    finding = find(examine(build), "address")

    assert "the host name cannot be resolved" in finding.detail
    assert "the spelling of the name" in finding.fix


@pytest.mark.parametrize(
    ("address", "is_named"), [(ADDRESS, True), (ADDRESS.replace("10.0.0.1", "127.0.0.1"), False)]
)
def test_closed_port_of_another_machine_may_be_shut_by_a_firewall(
    address: str, is_named: bool
) -> None:
    async def build(swarm: Swarm) -> None:
        swarm.dial_error = ConnectionRefusedError(111, "refused")

    fix = find(examine(build, addresses=[address]), "address").fix

    assert "still runs" in fix
    assert ("a firewall or router there blocks TCP port 4001" in fix) == is_named


def test_several_failures_of_one_dial_are_shown_without_numbers() -> None:
    async def build(swarm: Swarm) -> None:
        swarm.dial_error = OSError("Multiple exceptions: [Errno 111] refused, [Errno 113] no route")

    assert find(examine(build), "address").detail.endswith(": refused, no route")


def test_addresses_of_two_swarms_are_not_a_matter_of_codes() -> None:
    async def build(swarm: Swarm) -> None:
        swarm.join_error = WrongSwarmError("the addresses belong to different swarms; give one")

    assert "give addresses of one swarm only" in find(examine(build), "membership").fix


@pytest.mark.parametrize("detail", ["wrong secret: another swarm", "not a member: it is private"])
def test_swarm_of_others_is_told_from_a_broken_directory(detail: str) -> None:
    async def build(swarm: Swarm) -> None:
        swarm.join_error = WrongSwarmError(detail)

    finding = find(examine(build), "membership")

    assert not finding.ok
    assert finding.detail == detail
    assert "for a join code" in finding.fix
