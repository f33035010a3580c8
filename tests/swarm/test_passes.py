"""Gradients through a swarm are those of transformers, whoever is lost on the way."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from memory_swarm import look_into
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.client import AutoDistributedModelForCausalLM
from shoal.client.model.causal_lm import DistributedCausalLM
from shoal.client.model.remote_blocks import RemoteSequential
from shoal.client.passes import microbatches
from shoal.client.passes.microbatches import HopInput
from shoal.client.passes.pass_links import MAX_IN_FLIGHT, PassLink
from shoal.client.session import deep_prompts
from shoal.client.training import remote_passes
from shoal.peer.local_swarm.loopback import LoopbackSwarm
from shoal.protocol import limits
from shoal.protocol.errors import RefusedError, UnavailableError, UsageError

HIDDEN = 64
ONE_HOP = ((0, 4),)
FOUR_HOPS = ((0, 1), (1, 2), (2, 3), (3, 4))
REPLICAS = ((0, 2), (0, 2), (2, 4), (2, 4))
TOLERANCE = 1e-4


@contextlib.contextmanager
def swarm_of(
    tiny_models: Any, spans: Sequence[tuple[int, int]] = FOUR_HOPS, **settings: Any
) -> Iterator[tuple[LoopbackSwarm, DistributedCausalLM]]:
    directory = tiny_models.get().directory
    swarm = LoopbackSwarm(directory, spans, weights=settings.get("weights", "fp32"))
    with AutoDistributedModelForCausalLM.from_pretrained(
        directory, connect=swarm.connect, **settings
    ) as model:
        yield swarm, model


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run_reference(
    tiny_model: Any, hidden: Tensor, prompts: Tensor | None = None, span: slice = slice(None)
) -> Tensor:
    """Run transformers' own blocks, and add the prompts to what each of them is given."""
    decoder = tiny_model.decoder
    positions = torch.arange(hidden.shape[1])[None]
    rotations = decoder.rotary_emb(hidden, positions)
    num_tokens = hidden.shape[1]
    mask = torch.full((num_tokens, num_tokens), float("-inf")).triu(1)[None, None]
    for place, layer in enumerate(decoder.layers[span]):
        if prompts is not None:
            rest = num_tokens - prompts.shape[2]
            hidden = hidden + F.pad(prompts[place].expand(len(hidden), -1, -1), (0, 0, 0, rest))
        output = layer(hidden, attention_mask=mask, position_embeddings=rotations)
        hidden = output if isinstance(output, Tensor) else output[0]
    return hidden


def assert_close(
    found: Tensor | None, expected: Tensor | None, tolerance: float = TOLERANCE
) -> None:
    assert found is not None
    assert expected is not None
    assert found.shape == expected.shape
    found, expected = found.detach(), expected.detach()
    error = float((found - expected).norm() / expected.norm())
    assert error < tolerance, error


def compare(
    blocks: RemoteSequential,
    tiny_model: Any,
    prompt_rows: int | None = None,
    num_rows: int = 3,
    num_tokens: int = 20,
) -> None:
    """Compare outputs and gradients of one batch there and back."""
    inputs = [draw(num_rows, num_tokens, HIDDEN)]
    if prompt_rows is not None:
        inputs.append(0.3 * draw(len(blocks), prompt_rows, 5, HIDDEN, seed=2))
    grads = draw(num_rows, num_tokens, HIDDEN, seed=3)
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    theirs = [tensor.clone().requires_grad_() for tensor in inputs]

    output = blocks(*ours)
    expected = run_reference(tiny_model, *theirs, span=slice(blocks.span.start, blocks.span.stop))
    output.backward(grads)
    expected.backward(grads)

    assert_close(output, expected)
    for mine, their in zip(ours, theirs, strict=True):
        assert_close(mine.grad, their.grad)


@pytest.mark.parametrize("spans", [ONE_HOP, FOUR_HOPS], ids=["one hop", "four hops"])
@pytest.mark.parametrize("prompt_rows", [None, 1, 3])
def test_gradients_are_those_of_transformers(
    tiny_models: Any, spans: Sequence[tuple[int, int]], prompt_rows: int | None
) -> None:
    with swarm_of(tiny_models, spans) as (_, model):
        compare(model.transformer.h, tiny_models.get(), prompt_rows)


@pytest.mark.parametrize("prompt_rows", [1, 4])
def test_microbatches_of_one_row_share_prompts_only_where_the_batch_does(
    tiny_models: Any, prompt_rows: int
) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        compare(model.transformer.h, tiny_models.get(), prompt_rows, num_rows=4, num_tokens=256)


@pytest.mark.slow
def test_batch_of_more_rows_than_a_message_has_is_cut(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        compare(model.transformer.h, tiny_models.get(), num_rows=300, num_tokens=2)
        empty = torch.empty(0, 5, HIDDEN).requires_grad_()
        assert model.transformer.h(empty).shape == (0, 5, HIDDEN)


def test_replica_with_memory_takes_what_another_one_has_none_for(tiny_models: Any) -> None:
    with swarm_of(tiny_models, REPLICAS) as (swarm, model):
        look_into(swarm.peers[0]).read_free_bytes = lambda: 1
        for _ in range(5):
            compare(model.transformer.h, tiny_models.get())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The peers that were asked to compute a pass, as they are."""
    asked: list[str] = []
    ask = PassLink.ask

    async def note_and_ask(link: PassLink, *arguments: Any) -> Any:
        asked.append(link.peer.peer_id)
        return await ask(link, *arguments)

    monkeypatch.setattr(PassLink, "ask", note_and_ask)
    return asked


@pytest.mark.slow
def test_peer_that_stands_still_is_waited_for_once_and_not_by_every_microbatch(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    """With more waiting for its places, most of them have to ask somebody else at once."""
    monkeypatch.setattr(remote_passes, "MOST_TOKENS", 64)
    with swarm_of(tiny_models, ((0, 4), (0, 4)), connect_timeout_seconds=1.0) as (swarm, model):
        hidden = draw(32, 64, HIDDEN).requires_grad_()
        model.transformer.h(hidden).sum().backward()  # both are known to work
        assert len(set(asked)) == 2
        asked.clear()
        swarm.network.pause("peer0")
        model.transformer.h(hidden).sum().backward()

        assert asked.count(swarm.peers[0].peer_id) <= MAX_IN_FLIGHT


def test_slices_and_prompts_without_a_gradient(tiny_models: Any) -> None:
    with swarm_of(tiny_models, REPLICAS) as (_, model):
        blocks = model.transformer.h[1:3]
        compare(blocks, tiny_models.get(), prompt_rows=1)
        hidden, prompts = draw(2, 9, HIDDEN), draw(2, 2, 4, HIDDEN, seed=2)
        expected = run_reference(tiny_models.get(), hidden, prompts, slice(1, 3))
        with torch.no_grad():
            assert_close(blocks(hidden, prompts), expected)


def test_graph_that_is_retained_can_be_gone_back_through_again(tiny_models: Any) -> None:
    with swarm_of(tiny_models) as (_, model):
        hidden = draw(2, 7, HIDDEN).requires_grad_()
        output = model.transformer.h(hidden)
        (once,) = torch.autograd.grad(output.sum(), hidden, retain_graph=True)
        (twice,) = torch.autograd.grad(output.sum(), hidden)

        assert torch.equal(once, twice)


def test_checkpoint_keeps_only_what_goes_in(tiny_models: Any) -> None:
    """Between the two ways no saved input is in memory; otherwise it is."""
    with swarm_of(tiny_models) as (_, model):
        hidden = draw(2, 7, HIDDEN).requires_grad_()
        with counting_stages() as count:
            outputs = [model.transformer.h(hidden)]
            assert count() == len(FOUR_HOPS)
            del outputs[:]
            for is_reentrant in (True, False):
                output = checkpoint(model.transformer.h, hidden, use_reentrant=is_reentrant)
                assert count() == 0
                output.sum().backward()
                assert count() == 0


def test_checkpoint_may_take_another_route_the_second_time(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ((0, 4), (0, 2), (2, 4))) as (swarm, model):
        hidden = draw(2, 7, HIDDEN).requires_grad_()
        (expected,) = torch.autograd.grad(model.transformer.h(hidden).sum(), hidden)
        output = checkpoint(model.transformer.h, hidden, use_reentrant=False)
        swarm.network.kill("peer0")
        output.sum().backward()
        output = checkpoint(model.transformer.h, hidden, use_reentrant=False)
        output.sum().backward()

        assert_close(hidden.grad, 2 * expected)


def test_second_way_back_has_to_be_asked_for(tiny_models: Any) -> None:
    with swarm_of(tiny_models) as (_, model):
        output = model.transformer.h(draw(2, 7, HIDDEN).requires_grad_())
        output.sum().backward()

        with pytest.raises(RuntimeError, match="retain_graph=True"):
            output.sum().backward()


@contextlib.contextmanager
def counting_stages() -> Iterator[Callable[[], int]]:
    """Give a function that returns how many inputs of hops made inside are in memory."""
    gc.collect()
    before = {id(one) for one in gc.get_objects() if type(one) is HopInput}

    def count() -> int:
        gc.collect()
        return sum(type(one) is HopInput and id(one) not in before for one in gc.get_objects())

    yield count


@pytest.mark.parametrize("spans", [ONE_HOP, FOUR_HOPS], ids=["one hop", "four hops"])
def test_no_grad_computes_the_same(tiny_models: Any, spans: Sequence[tuple[int, int]]) -> None:
    """To the bit, also where steps of sessions are rounded otherwise than passes."""
    with swarm_of(tiny_models, spans, weights="int8") as (_, model):
        hidden = draw(2, 7, HIDDEN).requires_grad_()
        with torch.no_grad():
            output = model.transformer.h(hidden)
            last = model.transformer.h(hidden, last_token_only=True)

        assert not output.requires_grad
        assert torch.equal(output, model.transformer.h(hidden))
        assert torch.equal(output[:, -1:], last)


def test_no_grad_works_where_passes_do_not(tiny_models: Any) -> None:
    """At peers without memory for them, or of another version: in a session, then."""
    hidden = draw(1, 9, HIDDEN)
    with swarm_of(tiny_models, ONE_HOP) as (swarm, model):
        expected = run_reference(tiny_models.get(), hidden)
        look_into(swarm.peers[0]).read_free_bytes = lambda: 1
        with torch.no_grad():
            assert_close(model.transformer.h(hidden), expected)
        with pytest.raises(RefusedError, match="smaller microbatches"):
            model.transformer.h(hidden.requires_grad_())


def test_autocast_leaves_remote_blocks_alone(tiny_models: Any) -> None:
    """They compute as their peers do; what is around them is autocast as usual."""
    with swarm_of(tiny_models) as (_, model):
        hidden, layer = draw(2, 7, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
        hidden.requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            entering = layer(hidden)
            output = model.transformer.h(entering)
            loss = layer(output).float().square().mean()
        loss.backward()
        expected = run_reference(tiny_models.get(), entering.float())

        assert (entering.dtype, output.dtype) == (torch.bfloat16, torch.bfloat16)
        assert torch.equal(output, expected.bfloat16()) or torch.allclose(
            output.float(), expected, rtol=0.01, atol=0.02
        )
        assert hidden.grad is not None
        assert layer.weight.grad is not None
        assert bool(hidden.grad.isfinite().all())


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_gradients_survive_floats_of_few_exponents(tiny_models: Any, size: float) -> None:
    """Those of a mean over many tokens are below what fp16 has; large ones are above."""
    with swarm_of(tiny_models, FOUR_HOPS, wire_dtype="fp16") as (_, model):
        hidden, prompts = draw(2, 20, HIDDEN), 0.3 * draw(4, 1, 3, HIDDEN, seed=2)
        ours = [tensor.clone().requires_grad_() for tensor in (hidden, prompts)]
        theirs = [tensor.clone().requires_grad_() for tensor in (hidden, prompts)]
        model.transformer.h(*ours).backward(torch.full_like(hidden, size))
        expected = run_reference(tiny_models.get(), theirs[0], theirs[1])
        expected.backward(torch.full_like(hidden, size))

        for mine, their in zip(ours, theirs, strict=True):
            assert_close(mine.grad, their.grad, tolerance=0.01)


def test_batch_of_more_prompts_than_a_message_has_is_cut(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_PASS_PROMPTS", 50)
    monkeypatch.setattr(microbatches, "MAX_PASS_PROMPTS", 50)
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        compare(model.transformer.h, tiny_models.get(), prompt_rows=7, num_rows=7)


def test_prompts_that_no_message_has_room_for_are_named(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_prompts, "MAX_PASS_PROMPTS", 11)
    with swarm_of(tiny_models, ONE_HOP) as (_, model), pytest.raises(UsageError, match="too long"):
        model.transformer.h(draw(1, 5, HIDDEN), draw(4, 1, 3, HIDDEN))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_outputs_and_gradients_have_the_dtype_of_the_inputs(
    tiny_models: Any, dtype: torch.dtype
) -> None:
    with swarm_of(tiny_models) as (_, model):
        hidden = draw(1, 5, HIDDEN).to(dtype).requires_grad_()
        output = model.transformer.h(hidden)
        output.sum().backward()

        assert hidden.grad is not None
        assert (output.dtype, hidden.grad.dtype) == (dtype, dtype)


@pytest.mark.parametrize("when", ["before", "between"])
def test_lost_peer_is_replaced(tiny_models: Any, when: str) -> None:
    """Its gradients come from another one, which gets what it was sent."""
    with swarm_of(tiny_models, REPLICAS) as (swarm, model):
        blocks, hidden = model.transformer.h, draw(4, 20, HIDDEN).requires_grad_()
        expected = torch.autograd.grad(blocks(hidden).sum(), hidden)
        if when == "before":
            swarm.network.kill("peer0")
            swarm.network.kill("peer3")
        output = blocks(hidden)
        if when == "between":
            swarm.network.kill("peer0")
            swarm.network.kill("peer3")
        found = torch.autograd.grad(output.sum(), hidden)

        assert_close(found[0], expected[0])


@pytest.mark.slow
def test_span_that_nobody_hosts_alone_any_more_is_gone_back_through_in_parts(
    tiny_models: Any,
) -> None:
    with swarm_of(tiny_models, ((0, 4), (0, 1), (1, 3), (3, 4))) as (swarm, model):
        swarm.network.pause("peer1")
        swarm.network.pause("peer2")
        hidden = draw(4, 20, HIDDEN).requires_grad_()
        prompts = 0.3 * draw(4, 4, 3, HIDDEN)
        prompts.requires_grad_()
        output = model.transformer.h(hidden, prompts)
        swarm.network.resume("peer1")
        swarm.network.resume("peer2")
        swarm.network.kill("peer0")
        found = torch.autograd.grad(output.sum(), (hidden, prompts))

        reference = run_reference(tiny_models.get(), hidden, prompts)
        expected = torch.autograd.grad(reference.sum(), (hidden, prompts))
        for mine, their in zip(found, expected, strict=True):
            assert_close(mine, their)


def test_blocks_that_nobody_serves_are_named_in_time(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ((0, 2), (2, 4)), failover_timeout_seconds=0.5) as (swarm, model):
        hidden = draw(1, 5, HIDDEN).requires_grad_()
        output = model.transformer.h(hidden)
        swarm.network.kill("peer1")

        with pytest.raises(UnavailableError, match="blocks 2:4"):
            output.sum().backward()


def test_not_a_number_is_refused_and_nobody_is_blamed(tiny_models: Any) -> None:
    with swarm_of(tiny_models) as (_, model):
        hidden = draw(1, 5, HIDDEN).requires_grad_()
        output = model.transformer.h(hidden)
        with pytest.raises(RefusedError, match="not finite"):
            output.backward(torch.full_like(output, float("nan")))
        output.sum().backward()

        assert hidden.grad is not None


@pytest.mark.parametrize(
    "shape",
    [(3, 1, 2, HIDDEN), (4, 2, 2, HIDDEN), (4, 1, 6, HIDDEN), (1, 2, HIDDEN)],
)
def test_prompts_that_do_not_fit_are_named(tiny_models: Any, shape: tuple[int, ...]) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (_, model), pytest.raises(UsageError, match="prompts"):
        model.transformer.h(draw(1, 5, HIDDEN), draw(*shape))


def test_soft_prompt_before_the_text_gets_its_gradient(tiny_models: Any) -> None:
    """Through embeddings, remote blocks, final norm and head, as in transformers."""
    tiny = tiny_models.get()
    with swarm_of(tiny_models, REPLICAS) as (_, model):
        tokens = torch.arange(24).view(2, 12) + 5
        ours = draw(1, 3, HIDDEN).requires_grad_()
        theirs = ours.detach().clone().requires_grad_()
        losses: list[Tensor] = []
        for soft_prompt, causal_lm in ((ours, model), (theirs, tiny.reference)):
            text = causal_lm.get_input_embeddings()(tokens)
            embeddings = torch.cat([soft_prompt.expand(2, -1, -1), text], dim=1)
            logits = causal_lm(inputs_embeds=embeddings).logits[:, 2:-1]
            losses.append(F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
            losses[-1].backward()

        assert torch.allclose(losses[0], losses[1], rtol=1e-5)
        assert_close(ours.grad, theirs.grad)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("prompt_rows", [1, 4])
def test_microbatches_are_halved_until_a_peer_has_memory_for_them(
    tiny_models: Any, prompt_rows: int
) -> None:
    with swarm_of(tiny_models, ((0, 2), (2, 4))) as (swarm, model):
        service = look_into(swarm.peers[1])
        enough = service.engine.passes.estimate_bytes(2, 1, 20, is_backward=True)
        service.read_free_bytes = lambda: enough

        compare(model.transformer.h, tiny_models.get(), prompt_rows, num_rows=4)


def test_microbatches_grow_again_once_a_peer_has_memory_for_them(
    tiny_models: Any, asked: list[str]
) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (swarm, model):
        service, hidden = look_into(swarm.peers[0]), draw(4, 20, HIDDEN).requires_grad_()
        enough = service.engine.passes.estimate_bytes(4, 1, 20, is_backward=False)
        service.read_free_bytes = lambda: enough
        model.transformer.h(hidden)
        service.read_free_bytes = lambda: 2**30
        nums_asked: list[int] = []
        for _ in range(70):
            asked.clear()
            model.transformer.h(hidden)
            nums_asked.append(len(asked))
        assert (nums_asked[0], nums_asked[-1]) == (4, 1)


def test_peer_that_stays_without_memory_seldom_declines(tiny_models: Any, asked: list[str]) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (swarm, model):
        service, hidden = look_into(swarm.peers[0]), draw(4, 20, HIDDEN).requires_grad_()
        enough = service.engine.passes.estimate_bytes(4, 1, 20, is_backward=False)
        service.read_free_bytes = lambda: enough
        model.transformer.h(hidden)
        asked.clear()
        for _ in range(35):
            model.transformer.h(hidden)
        num_declined = len(asked) - 35 * 4
        assert num_declined == 2  # of one forward, in both halves


def test_peer_without_memory_for_training_is_not_asked(tiny_models: Any, asked: list[str]) -> None:
    directory = tiny_models.get().directory
    swarm = LoopbackSwarm(directory, ((0, 4), (0, 4)), weights="fp32")
    configs = swarm._configs  # pyright: ignore[reportPrivateUsage]
    configs["peer0"] = replace(configs["peer0"], pass_bytes=0)
    with AutoDistributedModelForCausalLM.from_pretrained(directory, connect=swarm.connect) as model:
        for _ in range(4):
            compare(model.transformer.h, tiny_models.get())
        assert set(asked) == {swarm.peers[1].peer_id}


def test_who_answered_is_told_once(tiny_models: Any) -> None:
    with swarm_of(tiny_models) as (_, model):
        blocks = model.transformer.h
        blocks(draw(2, 5, HIDDEN).requires_grad_()).sum().backward()

        hops = blocks.take_recent_hops()

        assert [(hop.span.start, hop.span.stop) for hop in hops] == list(FOUR_HOPS)
        assert len({hop.peer.peer_id for hop in hops}) == 4
        assert blocks.take_recent_hops() == []


def test_who_was_lost_and_who_took_over_is_told_once(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive_answer, lost = PassLink.receive_answer, list[int]()
    with swarm_of(tiny_models, REPLICAS) as (swarm, model):
        blocks, ids = model.transformer.h, [peer.peer_id for peer in swarm.peers]
        blocks(draw(2, 5, HIDDEN).requires_grad_())
        assert blocks.take_failovers() == []

        async def lose_and_receive(link: PassLink, *arguments: Any) -> Any:
            if not lost:
                lost.append(ids.index(link.peer.peer_id))
                swarm.network.kill(f"peer{lost[0]}")
            return await receive_answer(link, *arguments)

        monkeypatch.setattr(PassLink, "receive_answer", lose_and_receive)
        blocks(draw(2, 5, HIDDEN).requires_grad_()).sum().backward()

        (failover,) = blocks.take_failovers()
        assert failover.lost.peer.peer_id == ids[lost[0]]
        assert [hop.peer.peer_id for hop in failover.replacements] == [ids[lost[0] ^ 1]]
        assert failover.what_happened == "was lost"
        assert failover.reason
        assert blocks.take_failovers() == []
