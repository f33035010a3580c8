"""A model over a loopback swarm beside plain transformers, tuned in the same way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm

ONE_HOP = ((0, 4),)
FOUR_HOPS = ((0, 1), (1, 2), (2, 3), (3, 4))
REPLICAS = ((0, 2), (0, 2), (2, 4), (2, 4))
TOLERANCE = 1e-4


@contextlib.contextmanager
def open_model(
    tiny_model: Any,
    spans: Sequence[tuple[int, int]] = FOUR_HOPS,
    kind: Any = AutoDistributedModelForCausalLM,
    **options: Any,
) -> Iterator[Any]:
    swarm = LoopbackSwarm(tiny_model.directory, spans, weights="fp32")
    torch.manual_seed(0)
    with kind.from_pretrained(tiny_model.directory, connect=swarm.connect, **options) as model:
        model.swarm = swarm
        yield model


def make_batch(
    num_rows: int = 3, num_tokens: int = 14, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, padded on the right, their mask, and labels of what is not padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 128, (num_rows, num_tokens), generator=generator)
    lengths = torch.arange(num_rows)[:, None]
    mask = (torch.arange(num_tokens) < num_tokens - 2 * lengths).long()
    return ids, mask, torch.where(mask == 1, ids, -100)


class LocalPromptTuning(nn.Module):
    """What prompt tuning is, over transformers' own model."""

    def __init__(self, tiny_model: Any, model: Any) -> None:
        """Begin with the prompts of a distributed model."""
        super().__init__()
        self._reference = [tiny_model.reference]  # not a module of this one: it stays frozen
        transformer = model.transformer
        self.prompt = nn.Parameter(transformer.prompt_embeddings.weight.detach().clone())
        deep = transformer.intermediate_prompt_embeddings
        self.deep = None if deep is None else nn.Parameter(deep.weight.detach().clone())

    @contextlib.contextmanager
    def _prompting(self) -> Iterator[None]:
        layers = _find_layers(self._reference[0])

        def add(index: int, arguments: tuple[Any, ...], options: Any) -> Any:
            assert self.deep is not None
            hidden = arguments[0]
            size = hidden.shape[-1]
            prompt = self.deep[:, index * size : (index + 1) * size]
            padding = (0, 0, 0, hidden.shape[1] - len(prompt))
            return (hidden + F.pad(prompt, padding), *arguments[1:]), options

        hooks = [
            layer.register_forward_pre_hook(
                lambda _, arguments, options, index=index: add(index, arguments, options),
                with_kwargs=True,
            )
            for index, layer in enumerate(layers if self.deep is not None else ())
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def embed(self, ids: Tensor) -> Tensor:
        """Return a text, of ids or embedded, behind the prompt."""
        is_embedded = ids.is_floating_point()
        embeddings = ids if is_embedded else self._reference[0].get_input_embeddings()(ids)
        return torch.cat([self.prompt.expand(len(ids), -1, -1), embeddings], dim=1)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:
        # As in PETALS, the first token of the text is not predicted from the prompt.
        size, labels = len(self.prompt), F.pad(labels[:, 1:], (1, 0), value=-100)
        with self._prompting():
            return self._reference[0](
                inputs_embeds=self.embed(ids),
                attention_mask=F.pad(mask, (size, 0), value=1),
                labels=F.pad(labels, (size, 0), value=-100),
            )

    def generate(self, ids: Tensor, **options: Any) -> Tensor:
        """Return the text and what follows it, computed without a cache."""
        text = ids
        with self._prompting(), torch.no_grad():
            for _ in range(options["max_new_tokens"]):
                logits = self._reference[0](inputs_embeds=self.embed(text)).logits
                text = torch.cat([text, logits[:, -1:].argmax(-1)], dim=1)
        return text

    def list_gradients(self) -> list[Tensor]:
        gradients = [self.prompt.grad, None if self.deep is None else self.deep.grad]
        return [gradient for gradient in gradients if gradient is not None]


def _find_layers(reference: Any) -> Sequence[nn.Module]:
    base = getattr(reference.base_model, "decoder", reference.base_model)
    return base.layers if hasattr(base, "layers") else base.h


def list_trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def assert_close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.shape == expected.shape
    error = float((found - expected).norm() / expected.norm())
    assert error < TOLERANCE, error


def roughen(model: Any) -> None:
    """Give deep prompts, which begin as zeros, other values."""
    deep = model.transformer.intermediate_prompt_embeddings
    if deep is not None:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            deep.weight.copy_(0.2 * torch.randn(deep.weight.shape, generator=generator))
