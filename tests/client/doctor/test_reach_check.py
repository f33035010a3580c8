"""What the answers of those come to who were asked to dial this machine."""

from __future__ import annotations

import pytest
from diagnosis_scene import Swarm, examine, find

from shoal.client.doctor.finding import FindingStatus
from shoal.client.doctor.reach_check import ListenAddress, judge_reach
from shoal.protocol.errors import DirectoryError, P2pdEndedError, UnavailableError, UsageError
from shoal.protocol.net.addresses import DialBackAnswer
from shoal.protocol.spans import Span

HOME, ROUTER = "192.168.0.2", "203.0.113.5"
ADDRESS = ListenAddress("0.0.0.0", 7000, HOME)


@pytest.mark.parametrize(
    ("answers", "status", "words"),
    [
        (
            [(True, HOME), (True, HOME), (False, HOME)],
            FindingStatus.OK,
            "2 of 3 peers that were asked can",
        ),
        (
            [(False, HOME), (False, HOME), (True, HOME)],
            FindingStatus.WARNING,
            "a firewall blocks it",
        ),
        ([(False, ROUTER), (False, ROUTER)], FindingStatus.WARNING, f"as {ROUTER}, not as {HOME}"),
        ([(True, ROUTER), (None, "")], FindingStatus.WARNING, "behind a NAT"),
        ([(None, ""), (None, HOME)], FindingStatus.WARNING, "no peer on another machine could be"),
        ([(True, HOME)] * 2 + [(True, "; rm -rf")], FindingStatus.OK, "3 of 3"),
        ([(True, HOME)] * 2 + [(True, ROUTER)], FindingStatus.OK, "3 of 3"),
        ([(True, "127.0.0.1")], FindingStatus.WARNING, "no peer on another machine could be"),
        ([], FindingStatus.WARNING, "no peer on another machine could be"),
    ],
)
def test_answers_come_to_one_finding(
    answers: list[tuple[bool | None, str]], status: FindingStatus, words: str
) -> None:
    finding = judge_reach(ADDRESS, [DialBackAnswer(*answer) for answer in answers])

    assert finding.status is status
    assert words in finding.detail
    assert bool(finding.fix) is (status is not FindingStatus.OK)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (DialBackAnswer(False, HOME), "open TCP port 7000"),
        (DialBackAnswer(False, ROUTER), f"--listen 0.0.0.0:7000 --announce-host {ROUTER}"),
        (DialBackAnswer(True, ROUTER), f"announce its address with --announce-host {ROUTER}"),
    ],
)
def test_fix_says_what_to_type(answer: DialBackAnswer, words: str) -> None:
    assert words in judge_reach(ADDRESS, [answer]).fix


def test_port_that_is_not_fixed_is_not_named() -> None:
    listen_address = ListenAddress("0.0.0.0", 0, HOME)
    assert (
        "its port (--listen HOST:PORT fixes its number"
        in judge_reach(listen_address, [DialBackAnswer(False, HOME)]).fix
    )
    assert "0.0.0.0:PORT" in judge_reach(listen_address, [DialBackAnswer(False, ROUTER)]).fix


def test_name_may_stand_for_what_others_see() -> None:
    finding = judge_reach(
        ListenAddress("0.0.0.0", 7000, "peer.example"), [DialBackAnswer(True, ROUTER)]
    )
    assert finding.status is FindingStatus.OK


def test_loopback_is_for_this_machine_only() -> None:
    finding = judge_reach(
        ListenAddress("127.0.0.1", 0, "127.0.0.1"), [DialBackAnswer(True, "127.0.0.1")]
    )
    assert finding.status is FindingStatus.WARNING
    assert "--local" in finding.fix


def test_doctor_asks_only_with_a_door_and_tells_what_it_heard() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8))
        swarm.reach = [DialBackAnswer(True, HOME)]

    assert all(finding.name != "reach" for finding in examine(build).findings)
    diagnosis = examine(build, listen_address=ADDRESS)
    assert find(diagnosis, "reach").detail == f"1 of 1 peers that were asked can dial {HOME}:7000"
    assert diagnosis.is_well


def test_port_in_use_is_broken() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8))
        swarm.reach_error = UsageError("cannot listen on 0.0.0.0:7000: in use")

    finding = find(examine(build, listen_address=ADDRESS), "reach")
    assert finding.status is FindingStatus.BROKEN
    assert "in use" in finding.detail


@pytest.mark.parametrize("is_joined", [True, False])
def test_end_of_our_own_p2pd_is_no_lack_of_peers(is_joined: bool) -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8))
        swarm.reach_error = P2pdEndedError("p2pd on this machine ended")
        swarm.join_error = None if is_joined else swarm.reach_error

    diagnosis = examine(build, listen_address=ADDRESS)

    assert find(diagnosis, "p2pd").status is FindingStatus.BROKEN
    assert "reach" not in {finding.name for finding in diagnosis.findings}


@pytest.mark.parametrize(
    "error", [DirectoryError("no initial peer answers"), UnavailableError("p2pd has ended")]
)
def test_directory_in_trouble_is_no_fault_of_the_port(error: UnavailableError) -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8))
        swarm.reach_error = error

    diagnosis = examine(build, listen_address=ADDRESS)

    finding = find(diagnosis, "reach")
    assert finding.status is FindingStatus.WARNING
    assert "no peer on another machine could be asked" in finding.detail
    assert "--listen" not in finding.fix
    assert diagnosis.is_well
