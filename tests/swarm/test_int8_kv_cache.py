"""Texts whose keys and values peers keep in int8, through kills and with other settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_swarm import look_into
from torch import Tensor

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm
from shoal.protocol.errors import UsageError

SEED = 7
SPANS = [(0, 2), (0, 2), (2, 4), (2, 4)]
NUM_NEW_TOKENS = 24
PROMPT = torch.randint(3, 128, (1, 70), generator=torch.Generator().manual_seed(SEED))


class Killer:
    """A streamer that kills the peer of one hop in mid-sentence."""

    def __init__(self, swarm: LoopbackSwarm, session: Any, hop: int) -> None:
        self._swarm, self._session, self._hop = swarm, session, hop
        self._num_tokens = 0

    def put(self, value: Tensor) -> None:
        self._num_tokens += 1
        if self._num_tokens == 12:
            peer_id = self._session.hops[self._hop].peer.peer_id
            self._swarm.network.kill(self._swarm.find(peer_id).host)

    def end(self) -> None: ...


def tell(directory: Any, weights: str, kv_format: str, hop: int | None = None) -> Tensor:
    """Generate a text, and lose a hop on the way if one is named."""
    swarm = LoopbackSwarm(directory, spans=SPANS, weights=weights, seed=SEED)
    with (
        AutoDistributedModelForCausalLM.from_pretrained(
            directory, connect=swarm.connect, seed=SEED, kv_format=kv_format
        ) as model,
        model.inference_session(max_length=PROMPT.shape[1] + NUM_NEW_TOKENS) as session,
    ):
        text: Any = model.generate(
            PROMPT,
            max_new_tokens=NUM_NEW_TOKENS,
            min_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            streamer=None if hop is None else Killer(swarm, session, hop),
        )
        assert len(session.failovers) == (hop is not None)
    assert isinstance(text, torch.Tensor)
    return text


@pytest.mark.parametrize("weights", ["fp32", "int8"])
@pytest.mark.parametrize("hop", [0, 1])
def test_killed_peer_changes_no_word(tiny_models: Any, weights: str, hop: int) -> None:
    directory = tiny_models.get().directory

    undisturbed = tell(directory, weights, "int8")

    assert torch.equal(tell(directory, weights, "int8", hop), undisturbed)


def test_every_hop_and_replacement_keeps_the_format(tiny_models: Any) -> None:
    directory = tiny_models.get().directory

    as_floats, as_integers = (hold_session(directory, kv_format) for kv_format in ("float", "int8"))

    assert len(set(as_floats)) == len(set(as_integers)) == 1
    assert 2 * as_integers[0] < as_floats[0]


def hold_session(directory: Any, kv_format: str) -> list[int]:
    """Return the bytes that each hop's cache takes, one of which is a replacement."""
    swarm = LoopbackSwarm(directory, spans=SPANS, seed=SEED)
    with (
        AutoDistributedModelForCausalLM.from_pretrained(
            directory, connect=swarm.connect, seed=SEED
        ) as model,
        model.inference_session(max_length=64, kv_format=kv_format) as session,
    ):
        session.step(torch.zeros(1, 20, 64))
        swarm.network.kill(swarm.find(session.hops[1].peer.peer_id).host)
        session.step(torch.zeros(1, 1, 64))
        assert len(session.failovers) == 1
        peers = [swarm.find(hop.peer.peer_id) for hop in session.hops]
        return [
            held.cache.committed_bytes
            for peer in peers
            for held in look_into(peer).sessions.values()
        ]


def test_format_that_is_none_is_named(tiny_models: Any) -> None:
    directory = tiny_models.get().directory
    swarm = LoopbackSwarm(directory, spans=[(0, 4)], seed=SEED)
    with (
        AutoDistributedModelForCausalLM.from_pretrained(directory, connect=swarm.connect) as model,
        pytest.raises(UsageError, match="kv_format must be one of float, int8, not 'int4'"),
    ):
        model.transformer.h.open_session(8, "int4")


def test_beams_over_int8_caches_compute_what_their_rows_compute_alone(tiny_models: Any) -> None:
    """To the bit, as int8 weights do: also at a peer that takes over in the middle."""
    directory = tiny_models.get().directory
    generator = torch.Generator().manual_seed(SEED)
    prompts = torch.randn(3, 20, 64, generator=generator)
    tokens = torch.randn(3, 6, 64, generator=generator)
    maps = [(0, 1, 2), (2, 0, 2), (1, 1, 0), (0, 1, 2), (2, 2, 1), (1, 0, 2)]
    swarm = LoopbackSwarm(directory, spans=SPANS, weights="int8", seed=SEED)
    with AutoDistributedModelForCausalLM.from_pretrained(
        directory, connect=swarm.connect, seed=SEED, kv_format="int8"
    ) as model:
        with model.inference_session(max_length=64) as session:
            session.step(prompts)
            histories, outputs = prompts, prompts[:, :0]
            for step, row_map in enumerate(maps):
                rows, token = torch.tensor(row_map), tokens[:, step : step + 1]
                output = session.step(token, hypo_ids=rows)
                histories = torch.cat([histories[rows], token], dim=1)
                outputs = torch.cat([outputs[rows], output], dim=1)
                if step == 3:
                    peer_id = session.hops[0].peer.peer_id
                    swarm.network.kill(swarm.find(peer_id).host)
            assert len(session.failovers) == 1

        for history, output in zip(histories, outputs, strict=True):
            with model.inference_session(max_length=64) as session:
                session.step(history[None, :20])
                alone = [session.step(token[None, None]) for token in history[20:]]
                assert torch.equal(torch.cat(alone, dim=1)[0], output)
