"""Engines that run passes, and what transformers makes of the same texts."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading import engine_loader
from shoal.protocol.spans import Span

TOLERANCE = 1e-4
KV_BUDGET = 2**26


def stay() -> None:
    """Give way to nobody."""


def load_engine(
    tiny_model: Any, weights: WeightFormat = WeightFormat.FP32, span: Span | None = None
) -> Engine:
    """Load all blocks of a tiny model, or some."""
    checkpoint = Checkpoint.open(tiny_model.directory)
    span = span or Span(0, tiny_model.num_blocks)
    return engine_loader.load_engine(checkpoint, span, weights, kv_budget_bytes=KV_BUDGET)


@cache
def share_engine(
    tiny_model: Any, weights: WeightFormat = WeightFormat.FP32, span: Span | None = None
) -> Engine:
    """Return the engine of all tests that close the caches that they open, and change nothing."""
    return load_engine(tiny_model, weights, span)


def draw(*shape: int, seed: int = 1) -> Tensor:
    """Return normally distributed numbers, the same for a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_close(
    actual: Tensor | None, expected: Tensor | None, tolerance: float = TOLERANCE
) -> None:
    """Compare by length: single numbers may be near zero."""
    assert actual is not None
    assert expected is not None
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double(), expected.detach().double()
    error = float((actual - expected).norm() / expected.norm())
    assert error < tolerance, error


def embed(tiny_model: Any, num_rows: int, num_tokens: int) -> Tensor:
    """Return what the model's embedding makes of random tokens."""
    vocabulary = tiny_model.reference.config.vocab_size
    generator = torch.Generator().manual_seed(num_tokens)
    tokens = torch.randint(0, vocabulary, (num_rows, num_tokens), generator=generator)
    return tiny_model.embed(tokens)


def run_reference(decoder: Any, hidden: Tensor, prompts: Tensor | None) -> Tensor:
    """Run transformers' own blocks on hidden states; prompts are added to what each is given."""
    layers = next(
        module for module in decoder.children() if isinstance(module, torch.nn.ModuleList)
    )
    outputs: list[Tensor] = [hidden]

    def enter(place: int, inputs: tuple, options: dict) -> tuple[tuple, dict]:
        # Not what the decoder made of its embeddings.
        given = outputs[-1]
        if prompts is not None:
            rest = given.shape[1] - prompts.shape[2]
            given = given + F.pad(prompts[place].expand(len(given), -1, -1), (0, 0, 0, rest))
        return (given, *inputs[1:]), {k: v for k, v in options.items() if k != "hidden_states"}

    def leave(output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    handles = []
    for place, layer in enumerate(layers):
        handles += [
            layer.register_forward_pre_hook(
                lambda _, inputs, options, place=place: enter(place, inputs, options),
                with_kwargs=True,
            ),
            layer.register_forward_hook(lambda _, inputs, output: leave(output)),
        ]
    decoder(inputs_embeds=hidden.detach(), use_cache=False)
    for handle in handles:
        handle.remove()
    return outputs[-1]


def differentiate_reference(
    decoder: Any, hidden: Tensor, prompts: Tensor | None, grads: Tensor
) -> tuple[Tensor, ...]:
    """Return what transformers' blocks make of hidden states, and the gradients of what went in."""
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, prompts) if tensor is not None]
    output = run_reference(decoder, leaves[0], None if prompts is None else leaves[1])
    return output.detach(), *torch.autograd.grad(output, leaves, grads)
