"""What `shoal train` prints of a run over peers."""

from typing import Any

import pytest

from shoal.cli.training.run_events import RunEventPrinter
from shoal.peer.process.config import PeerEvent


def test_table_has_speed_and_the_peers_of_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    update: dict[str, Any] = {
        "update": 3,
        "loss": 7.19293,
        "gradient_norm": 1.73711,
        "averaging_seconds": 0.0312,
        "queue_seconds": [0.0204, 1.2],
        "parts_redone": 0,
        "members_per_stage": [2, 1],
    }
    peer: dict[str, Any] = {
        "peer": "12D3KooWKZe3vWf7SvDxaeC5kiLyvwgGxN6m2NPvWiwDoaXkuthG",
        "stage": 1,
    }

    print_event = RunEventPrinter()
    print_event(PeerEvent("online", {"name": "stories", "owner": "12D3", "run_id": "993747e6"}))
    print_event(PeerEvent("update", {**update, "tokens_per_second": None}))
    print_event(PeerEvent("member_left", peer))
    later = {**update, "update": 12345, "tokens_per_second": 871.4, "parts_redone": 3}
    print_event(PeerEvent("update", later))
    print_event(PeerEvent("held_out", {"update": 12345, "loss": 7.21, "entropy": 0.5}))
    print_event(PeerEvent("member_joined", peer))
    print_event(PeerEvent("begun_again", {"update": 12345}))
    print_event(PeerEvent("too_slow", {**peer, "why": "120 of 360 MB were there"}))

    lines = capsys.readouterr().out.splitlines()
    assert lines[3:] == [
        "  update      loss  gradient norm   tokens/s  averaging    queue, ms    peers",
        "       3    7.1929         1.7371          -     0.03 s      20+1200      2+1",
        "Peer …oaXkuthG left stage 1.",
        "3 parts of update 12345 had to be computed again.",
        "   12345    7.1929         1.7371        871     0.03 s      20+1200      2+1",
        "Held-out loss: 7.2100 nats per token; entropy of the corpus: 0.5000.",
        "Peer …oaXkuthG joined stage 1.",
        "The update under way begins again.",
        "Peer …oaXkuthG is too slow for stage 1: 120 of 360 MB were there.",
    ]


def test_events_of_a_run_beside_a_model_are_told_like_those_of_a_run_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    others = list[str]()

    print_event = RunEventPrinter(lambda event: others.append(event.name))
    print_event(PeerEvent("training", {"name": "stories", "owner": "12D3", "run_id": "993747e6"}))
    print_event(PeerEvent("online", {"span": "0:4"}))
    print_event(PeerEvent("training_stopped", {"why": "another machine"}))

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Training run stories of 12D3,"
    assert lines[-1] == "The run has stopped here: another machine"
    assert others == ["online"]


def test_model_that_nobody_has_written_can_be_exported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    RunEventPrinter()(PeerEvent("trained", {"held_out_loss": None}))

    assert capsys.readouterr().out.splitlines() == [
        "The run is over.",
        "`shoal export` saves its model while peers stay (--linger).",
    ]
