"""What doctor shows on terminals of every width."""

from __future__ import annotations

import pytest
from announcements import describe_peer
from screens import Screen

from shoal.cli.commands.doctor import _Screen  # pyright: ignore[reportPrivateUsage]
from shoal.cli.terminal.terminal import Terminal
from shoal.client.doctor.diagnosis import Diagnosis
from shoal.client.doctor.finding import Finding, FindingStatus
from shoal.client.doctor.peer_check import PeerCheck, PeerFault
from shoal.protocol.endpoints import Endpoint, Relay
from shoal.protocol.ids import ModelId, PeerId
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.spans import Span


@pytest.mark.parametrize("columns", [1, 20, 80])
def test_findings_are_shown_whole_on_every_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Screen()

    screen = _Screen(Terminal(stream))
    screen.show_finding(
        Finding("peers", FindingStatus.BROKEN, "nobody is there", "start two of them")
    )

    words = stream.text.split()
    assert words == ["✗", "peers", *"nobody is there".split(), "→", *"start two of them".split()]


@pytest.mark.parametrize(
    ("encoding", "columns", "expected"),
    [
        (
            "utf-8",
            80,
            [
                "peer     blocks  state        weights  steps/s  age  rtt     endpoint",
                "…peer-A  0:4     online       int8     -        5 s  2.0 ms  10.0.0.1:4000",
                "…peer-B  4:8     closed port  int8     -        5 s  -       10.0.0.1:4000",
            ],
        ),
        (
            "ascii",
            40,
            [
                "peer     blocks  state        weights .",
                "         endpoint",
                ".peer-A  0:4     online       int8    .",
                "         10.0.0.1:4000",
                ".peer-B  4:8     closed port  int8    .",
                "         10.0.0.1:4000",
            ],
        ),
    ],
)
def test_table_names_the_peers_that_do_not_answer_and_marks_what_is_cut(
    encoding: str, columns: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    peers = [
        describe_peer(
            peer_id=PeerId(f"a-peer-{'AB'[start // 4]}"), model_id=ModelId("m"), num_blocks=8,
            span=Span(start, start + 4), endpoints=(Endpoint("10.0.0.1", 4000),), issued_at=10.0,
            expires_at=99.0,
        )
        for start in (0, 4)
    ]  # fmt: skip
    diagnosis = Diagnosis(None)  # pyright: ignore[reportArgumentType] - nothing is examined
    diagnosis.view = SwarmView(ModelId("m"), 8, 15.0, tuple(peers))
    diagnosis.checks = [
        PeerCheck(peers[0], rtt_seconds=0.002), PeerCheck(peers[1], PeerFault.CLOSED_PORT)
    ]  # fmt: skip
    stream = Screen(encoding)

    _Screen(Terminal(stream)).show_peers(diagnosis)

    assert [line[1:] for line in stream.text.splitlines()[1:]] == expected


def test_endpoint_that_does_not_fit_beside_the_rest_stands_whole_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    relay = Relay("203.0.113.177", 40401, PeerId("12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4"))
    peer = describe_peer(
        peer_id=PeerId("a-peer-A"), model_id=ModelId("m"), num_blocks=8, span=Span(0, 8),
        endpoints=(), relays=(relay,), issued_at=10.0, expires_at=99.0,
    )  # fmt: skip
    diagnosis = Diagnosis(None)  # pyright: ignore[reportArgumentType] - nothing is examined
    diagnosis.view = SwarmView(ModelId("m"), 8, 15.0, (peer,))
    diagnosis.checks = [PeerCheck(peer, PeerFault.FINGERPRINT)]
    stream = Screen()

    _Screen(Terminal(stream)).show_peers(diagnosis)

    assert stream.text.splitlines()[-1].strip() == "203.0.113.177:40401 (relay)"
    assert all(len(line) <= 80 for line in stream.text.splitlines())


def test_advice_keeps_an_address_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    address = (
        "/ip4/203.0.113.177/tcp/40401/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    )
    stream = Screen()

    _Screen(Terminal(stream)).show_finding(
        Finding("blocks", FindingStatus.BROKEN, "none", f"run `shoal serve m {address}`")
    )

    assert address in stream.text
