"""A model that has been trained is written, also where a disk is full at first."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from training_runs import open_run
from virtual_time import VirtualClock, run_virtual

from shoal.cli.training.model_folder import keep_writing, write_losses, write_model
from shoal.peer.process.config import PeerEvent


def test_full_disk_is_told_in_one_sentence_and_nothing_is_left(tmp_path: Path) -> None:
    run, out = open_run(tmp_path)[0], tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=f"cannot write the model to {out}: .*too large"):
            write_model(out, run, "LlamaForCausalLM", {"weight": torch.ones(4096)}, {})
        assert list(out.iterdir()) == []
        with pytest.raises(OSError, match=f"cannot write the losses to {out}: .*too large"):
            write_losses(out, run, dict.fromkeys(range(1, 5), 1.0), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_model_is_written_once_there_is_room_for_it() -> None:
    events: list[PeerEvent] = []
    failures = [OSError("No space left on device")] * 3

    def write() -> None:
        if failures:
            raise failures.pop()

    run_virtual(keep_writing(write, VirtualClock(), events.append))

    assert not failures
    (event,) = events
    assert event.name == "waiting_for"
    assert str(event.facts["what"]).endswith("if the process ends before: No space left on device")
