"""Speculative decoding over a swarm: a small local model proposes the next tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from .model import DistributedCausalLM


class SpeculativeCausalLM(DistributedCausalLM):
    """Generates the same texts as without the small model, in fewer rounds through the swarm."""

    small_model: PreTrainedModel

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, model: Any, *, small_model: PreTrainedModel, **options: Any
    ) -> SpeculativeCausalLM:
        """Open a model that is assisted by `small_model`, a local model with the same tokenizer.

        All other arguments are those of DistributedModel.from_pretrained().
        """
        opened = super().from_pretrained(model, **options)
        # Not a module of this one: its weights are nobody's to train or save here.
        object.__setattr__(opened, "small_model", small_model)
        return opened

    def generate(self, *args: Any, **kwargs: Any) -> Tensor | ModelOutput:
        """See DistributedCausalLM.generate(); one row at a time, a limit of transformers."""
        return super().generate(*args, **{"assistant_model": self.small_model, **kwargs})
