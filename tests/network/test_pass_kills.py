"""A peer dies, or stands still, with a microbatch in its hands: the gradients are the same.

Real processes, fp32. The reference is transformers with peft, on the same weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_scene import make_adapter, open_with_peft
from torch import Tensor
from tuning_scene import LocalPromptTuning, assert_close, make_batch, roughen

from shoal.client import AutoDistributedModelForCausalLM
from shoal.client.passes.pass_links import PassLink
from shoal.peer.local_swarm.swarm import LocalPeer, LocalSwarm
from shoal.protocol.ids import PeerId
from shoal.protocol.messages.adapters import AdapterHead
from shoal.protocol.messages.passes import Pass, PassKind

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    # peft's own affair.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]

TWO_HOPS = ((0, 2), (2, 4))
FOUR_HOPS = ((0, 1), (1, 2), (2, 3), (3, 4))
HARM: dict[str, Callable[[LocalPeer], None]] = {"kill": LocalPeer.kill, "pause": LocalPeer.pause}

TEXTS = make_batch(4, 150)

Gradients = Mapping[str, Tensor | None]
HarmWhomever = Callable[[pytest.MonkeyPatch, Callable[[PeerId], None]], None]


class Scene:
    """A model with trained prompts and an adapter over a swarm, and what its gradients are."""

    def __init__(
        self, swarm: LocalSwarm, model: Any, tiny_model: Any, folder: Path, seed: int = 1
    ) -> None:
        roughen(model)
        self._swarm = swarm
        self._model = model
        self._adapter = make_adapter(model, seed)
        self._peft = open_with_peft(tiny_model, self._adapter, folder)

    def train(self) -> Gradients:
        """Return the gradients of everything that may have some, through the swarm."""
        texts, mask, labels = self._embed()
        self._model.zero_grad()
        self._adapter.zero_grad()
        with self._model.use_adapter(self._adapter):
            self._model(inputs_embeds=texts, attention_mask=mask, labels=labels).loss.backward()
        transformer = self._model.transformer
        return {
            "inputs": texts.grad,
            "shallow prompts": transformer.prompt_embeddings.weight.grad,
            "deep prompts": transformer.intermediate_prompt_embeddings.weight.grad,
            **{name: matrix.grad for name, matrix in self._adapter.named_matrices().items()},
        }

    def train_locally(self) -> Gradients:
        """Return the same by transformers and peft."""
        texts, mask, labels = self._embed()
        base = SimpleNamespace(reference=self._peft.get_base_model())
        tuned = LocalPromptTuning(base, self._model)
        tuned(texts, mask, labels).loss.backward()
        shallow, deep = tuned.list_gradients()
        return {
            "inputs": texts.grad,
            "shallow prompts": shallow,
            "deep prompts": deep,
            **{
                name.replace(".default", ""): matrix.grad
                for name, matrix in self._peft.named_parameters()
                if "lora_" in name
            },
        }

    def _embed(self) -> tuple[Tensor, Tensor, Tensor]:
        ids, mask, labels = TEXTS
        embeddings = self._peft.get_base_model().get_input_embeddings()(ids)
        return embeddings.detach().requires_grad_(), mask, labels

    def check_under(
        self,
        monkeypatch: pytest.MonkeyPatch,
        harm: str,
        harm_whomever: HarmWhomever,
        expected: Gradients,
    ) -> None:
        """Train while one peer is lost."""
        harmed: list[LocalPeer] = []

        def lose(peer_id: PeerId) -> None:
            if not harmed:
                harmed.append(self._swarm.find(peer_id))
                HARM[harm](harmed[0])

        with monkeypatch.context() as patch:
            harm_whomever(patch, lose)
            found = self.train()
        (peer,) = harmed
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_close(found[name], gradient)
        peer.kill()


def harm_whoever_is_asked(
    kind: PassKind, first_block: int, patch: pytest.MonkeyPatch, lose: Callable[[PeerId], None]
) -> None:
    """Lose the first peer that was sent a whole pass of a kind from some block on."""
    receive_answer = PassLink.receive_answer

    async def lose_and_receive(link: PassLink, asked: Pass, *arguments: Any) -> Any:
        if (asked.kind, asked.span.start) == (kind, first_block):
            lose(link.peer.peer_id)
        return await receive_answer(link, asked, *arguments)

    patch.setattr(PassLink, "receive_answer", lose_and_receive)


def harm_whoever_is_brought_an_adapter(
    first_block: int, patch: pytest.MonkeyPatch, lose: Callable[[PeerId], None]
) -> None:
    bring = PassLink.bring

    async def lose_and_bring(link: PassLink, head: AdapterHead, *arguments: Any) -> Any:
        if link.peer.span.start == first_block:
            lose(link.peer.peer_id)
        return await bring(link, head, *arguments)

    patch.setattr(PassLink, "bring", lose_and_bring)


@contextmanager
def open_swarm(
    tiny: Any, hops: Sequence[tuple[int, int]], **options: Any
) -> Iterator[tuple[LocalSwarm, Any]]:
    """Two peers for each hop, and a model over them."""
    spans = [hop for hop in hops for _ in range(2)]
    with (
        LocalSwarm(tiny.directory, spans=spans, weights="fp32") as swarm,
        AutoDistributedModelForCausalLM.from_pretrained(
            tiny.directory, initial_peers=swarm.initial_peers, seed=0, **options
        ) as model,
    ):
        yield swarm, model


ALL_LOSSES = tuple(itertools.product(PassKind, FOUR_HOPS))
"""Whose pass, and from which block on."""

CROSSED_LOSSES = {
    "kill": ((PassKind.FORWARD, TWO_HOPS[0]), (PassKind.BACKWARD, TWO_HOPS[1])),
    "pause": ((PassKind.FORWARD, TWO_HOPS[1]), (PassKind.BACKWARD, TWO_HOPS[0])),
}


@pytest.mark.parametrize(
    ("harm", "hops", "losses"),
    [
        pytest.param("kill", TWO_HOPS, CROSSED_LOSSES["kill"], id="two hops-kill"),
        pytest.param(
            "pause",
            TWO_HOPS,
            CROSSED_LOSSES["pause"],
            id="two hops-pause",
            marks=pytest.mark.thorough,
        ),
        *(
            pytest.param(h, FOUR_HOPS, ALL_LOSSES, id=f"four hops-{h}", marks=pytest.mark.thorough)
            for h in HARM
        ),
    ],
)
def test_gradients_are_those_of_transformers_whoever_is_lost(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, harm: str,
    hops: Sequence[tuple[int, int]], losses: Sequence[tuple[PassKind, tuple[int, int]]],
) -> None:  # fmt: skip
    tiny = tiny_models.get("llama")
    with open_swarm(tiny, hops, tuning_mode="deep_ptune", pre_seq_len=5) as (swarm, model):
        scene = Scene(swarm, model, tiny, tmp_path)
        expected = scene.train_locally()
        for number, (kind, hop) in enumerate(losses):
            at_hop = partial(harm_whoever_is_asked, kind, hop[0])
            scene.check_under(monkeypatch, harm, at_hop, expected)
            if any(later == hop for _, later in losses[number + 1 :]):
                swarm.add(hop)


@pytest.mark.thorough
@pytest.mark.parametrize("harm", HARM)
def test_adapter_reaches_somebody_else_where_a_peer_is_lost_that_gets_it(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, harm: str
) -> None:
    tiny = tiny_models.get("llama")
    with open_swarm(tiny, TWO_HOPS, tuning_mode="deep_ptune", pre_seq_len=5) as (swarm, model):
        for seed, hop in enumerate(TWO_HOPS):
            # Another adapter each time, which nobody has.
            scene = Scene(swarm, model, tiny, tmp_path / str(seed), seed)
            at_hop = partial(harm_whoever_is_brought_an_adapter, hop[0])
            scene.check_under(monkeypatch, harm, at_hop, scene.train_locally())


@pytest.mark.thorough
@pytest.mark.parametrize("harm", HARM)
def test_homes_of_an_optimizer_that_are_lost_take_nothing_with_them(
    tiny_models: Any, tmp_path: Path, harm: str
) -> None:
    """One before an update is made of its gradients, the other one in the middle of a batch."""
    tiny = tiny_models.get("llama")
    ids, mask, labels = TEXTS
    with open_swarm(tiny, TWO_HOPS) as (swarm, model):
        adapter = make_adapter(model)
        peft = open_with_peft(tiny, adapter, tmp_path)
        matrices = {name: x for name, x in peft.named_parameters() if "lora_" in name}
        # With a smaller epsilon, AdamW makes much of how sums are rounded.
        options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
        here = torch.optim.AdamW(matrices.values(), **options)
        there = model.optimizer_at_peers(adapter, "adamw", **options)
        lost: list[PeerId] = []

        def lose(block: int) -> None:
            hops = model.transformer.h.take_recent_hops()
            (home,) = [hop.peer.peer_id for hop in hops if hop.span.start == block]
            lost.append(home)
            HARM[harm](swarm.find(home))

        for number in range(4):
            loss = model(ids, attention_mask=mask, labels=labels, active_adapter=adapter).loss
            if number == 2:
                lose(2)
            loss.backward()
            if number == 1:
                lose(0)
            there.step()
            there.zero_grad()
            expected = peft(ids, attention_mask=mask, labels=labels).loss
            expected.backward()
            here.step()
            here.zero_grad()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-4)

        learned = adapter.state_dict()
        for name, matrix in matrices.items():
            assert_close(learned[name.replace(".default", "")], matrix.detach())
        failovers = model.transformer.h.take_failovers()
        assert [one.lost.peer.peer_id for one in failovers] == lost
        happened = {"kill": "was lost", "pause": "did not answer in time"}[harm]
        assert {one.what_happened for one in failovers} == {happened}
        for peer_id in lost:
            swarm.find(peer_id).kill()
