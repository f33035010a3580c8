"""A peer dies, or stands still, with a microbatch in its hands: the gradients are the same.

Real processes, fp32. The reference is the same swarm before anything happened, and it is compared
with transformers in `tests/swarm/test_passes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.client import AutoDistributedModelForCausalLM
from shoal.client.finetune.pass_link import PassLink
from shoal.peer.local_swarm import LocalPeer, LocalSwarm
from shoal.protocol.messages import Pass, PassKind

pytestmark = [pytest.mark.network, pytest.mark.slow]

SPANS = ((0, 2), (0, 2), (2, 4), (2, 4))
HARM: dict[str, Callable[[LocalPeer], None]] = {"kill": LocalPeer.kill, "pause": LocalPeer.pause}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def harm_whoever_is_asked(
    monkeypatch: pytest.MonkeyPatch, swarm: LocalSwarm, kind: PassKind, first_block: int, harm: str
) -> list[LocalPeer]:
    """Harm the first peer that was sent a whole pass of a kind from some block on."""
    harmed: list[LocalPeer] = []
    receive_answer = PassLink._receive_answer  # pyright: ignore[reportPrivateUsage]

    async def harm_and_receive(link: PassLink, asked: Pass, *arguments: Any) -> Any:
        if not harmed and (asked.kind, asked.span.start) == (kind, first_block):
            harmed.append(swarm.find(link.peer.peer_id))
            HARM[harm](harmed[0])
        return await receive_answer(link, asked, *arguments)

    monkeypatch.setattr(PassLink, "_receive_answer", harm_and_receive)
    return harmed


@pytest.mark.parametrize("harm", HARM)
def test_gradients_are_the_same_whoever_is_lost(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    directory = tiny_models.get("llama").directory
    texts, grads = draw(4, 150, 64, seed=1), draw(4, 150, 64, seed=2)
    prompts = 0.3 * draw(4, 1, 5, 64, seed=3)
    with (
        LocalSwarm(directory, spans=SPANS, weights="fp32") as swarm,
        AutoDistributedModelForCausalLM.from_pretrained(
            directory, initial_peers=swarm.initial_peers, seed=0
        ) as model,
    ):

        def train() -> tuple[Tensor, ...]:
            inputs = [tensor.clone().requires_grad_() for tensor in (texts, prompts)]
            output = model.transformer.h(*inputs)
            return output.detach(), *torch.autograd.grad(output, inputs, grads)

        expected = train()
        for kind in PassKind:
            for first_block in (0, 2):
                with monkeypatch.context() as patch:
                    harmed = harm_whoever_is_asked(patch, swarm, kind, first_block, harm)
                    found = train()
                (peer,) = harmed
                for mine, undisturbed in zip(found, expected, strict=True):
                    assert torch.allclose(mine, undisturbed, rtol=1e-4, atol=1e-5)
                peer.kill()
                swarm.add((first_block, first_block + 2))
