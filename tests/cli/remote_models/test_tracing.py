"""The file of a trace is there however the text ended, once there is something to tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from shoal.cli.remote_models.generation_options import Sampling
from shoal.cli.remote_models.text_generation import generate_text
from shoal.cli.remote_models.tracing import TraceFile
from shoal.client import AutoDistributedModelForCausalLM
from shoal.client.model.causal_lm import DistributedCausalLM
from shoal.client.trace.trace_summary import describe_summary
from shoal.peer.local_swarm.loopback import LoopbackSwarm
from shoal.protocol.errors import UsageError


def open_model(directory: Path) -> DistributedCausalLM:
    swarm = LoopbackSwarm(directory, [(0, 2), (2, 4)])
    return AutoDistributedModelForCausalLM.from_pretrained(directory, connect=swarm.connect)


def read_slices(path: Path) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if event["ph"] == "X"]


def test_text_that_ends_half_way_leaves_a_trace_of_that_half(
    byte_model: Path, byte_tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    pieces: list[str] = []

    def stop_after_three(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    with (
        open_model(byte_model) as model,
        pytest.raises(KeyboardInterrupt),
        TraceFile(path) as trace_file,
    ):
        generate_text(
            model, byte_tokenizer, "Once", Sampling(32), stop_after_three, trace_file.watch
        )

    assert read_slices(path).count("compute") == 2 * 3
    lines = trace_file.describe_cut()
    assert lines[0] == f"the incomplete trace is in {path}"
    assert "2 tokens decoded after it, in ms per token:" in lines


def test_summary_leaves_out_what_comes_behind_the_last_token(
    byte_model: Path, byte_tokenizer: Any, tmp_path: Path
) -> None:
    with open_model(byte_model) as model, TraceFile(tmp_path / "t") as trace_file:
        generate_text(
            model, byte_tokenizer, "Once", Sampling(4), lambda piece: None, trace_file.watch
        )
        summary = trace_file.summarize()

    assert summary is not None
    assert trace_file.summarize() == summary
    assert (summary.prefill.num_tokens, summary.num_decoded_tokens) == (4, 3)
    assert describe_summary(summary)[0].startswith("where the time went")


def test_session_of_another_number_of_rows_goes_on_being_taken_down(
    byte_model: Path, byte_tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    ids_BT = byte_tokenizer("Once", return_tensors="pt").input_ids
    with (
        open_model(byte_model) as model,
        TraceFile(path) as trace_file,
        model.inference_session(max_length=32) as session,
    ):
        trace_file.watch(session)
        session.step(torch.zeros(1, 1, 64))
        session.position = 0
        model.generate(ids_BT, max_new_tokens=2, num_beams=2)

    assert read_slices(path).count("open") == 2 * 2


@pytest.mark.parametrize("older", [None, "an older trace"])
def test_text_that_never_began_leaves_the_file_alone(tmp_path: Path, older: str | None) -> None:
    path = tmp_path / "trace.json"
    if older is not None:
        path.write_text(older)

    def fail() -> None:
        assert path.exists() == (older is not None)  # Ctrl-C may end the process right here
        trace_file.watch(cast("Any", SessionWithoutSteps()))
        raise UsageError("no model")

    with pytest.raises(UsageError, match="no model"), TraceFile(path) as trace_file:
        fail()

    assert (path.read_text() if path.exists() else None) == older
    assert trace_file.describe_cut() == []


class SessionWithoutSteps:
    def record(self, recorder: Any) -> None:
        """Do nothing that could be taken down."""


def test_file_that_takes_no_more_is_named_unless_something_worse_happened(
    byte_model: Path, byte_tokenizer: Any
) -> None:
    def generate(trace_file: TraceFile, error: UsageError | None = None) -> None:
        generate_text(
            model, byte_tokenizer, "Once", Sampling(2), lambda piece: None, trace_file.watch
        )
        if error is not None:
            raise error

    full = "cannot write the trace to /dev/full: No space left"
    with open_model(byte_model) as model:
        with pytest.raises(UsageError, match=full), TraceFile(Path("/dev/full")) as trace_file:
            generate(trace_file)
        with pytest.raises(UsageError, match="lost"), TraceFile(Path("/dev/full")) as trace_file:
            generate(trace_file, UsageError("lost"))


def test_without_a_file_nothing_is_taken_down() -> None:
    with TraceFile(None) as trace_file:
        trace_file.watch(cast("Any", SessionWithoutSteps()))

    assert trace_file.summarize() is None
