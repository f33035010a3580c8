"""A client whose directory is silent lives on what peers tell it. Real processes, fp32."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import children_of, is_running, kill_if_running

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.swarm import LocalSwarm

pytestmark = [pytest.mark.network, pytest.mark.slow]

PATIENCE_SECONDS = 60.0  # only a broken test waits this long
HALVES = ((0, 2), (2, 4))


def list_p2pd(parent: int) -> list[int]:
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in children_of(parent)}
    return [pid for pid, name in names.items() if name.startswith("p2pd")]


def test_text_goes_on_when_everybody_who_was_there_first_has_died(tiny_models: Any) -> None:
    tiny = tiny_models.get("llama")
    inputs = torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(1))
    expected = tiny.reference.generate(inputs, max_new_tokens=16, do_sample=False)
    before = set(list_p2pd(os.getpid()))
    with (
        contextlib.ExitStack() as ending,
        LocalSwarm(tiny.directory, spans=HALVES, weights="fp32") as swarm,
        AutoDistributedModelForCausalLM.from_pretrained(
            tiny.directory, initial_peers=swarm.initial_peers, refresh_seconds=1.0
        ) as opened,
        opened.inference_session(max_length=32) as session,
    ):
        model: Any = opened
        begun = model.generate(inputs, max_new_tokens=8, do_sample=False, session=session)
        (own,) = set(list_p2pd(os.getpid())) - before
        os.kill(own, signal.SIGSTOP)  # killed, it would be replaced
        ending.callback(kill_if_running, own)
        first = list(swarm.peers)

        newcomers = {swarm.add(span=span).peer_id for span in HALVES}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not newcomers <= {peer.peer_id for peer in model._client.view_swarm().online}:
            assert time.monotonic() < deadline, model._client.view_swarm()
            time.sleep(0.2)
        for peer in first:
            peer.kill()
        rest = model.generate(None, max_new_tokens=8, do_sample=False, session=session)

    assert not is_running(own)
    assert torch.equal(begun, expected[:, : begun.shape[1]])
    assert torch.equal(rest[:, -8:], expected[:, -8:])
