"""The causal language model that Python users open; its blocks are on other machines.

It is a transformers model: transformers' own generate() runs over a local embedding, norm and head,
and over remote blocks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..training.batch_checks import check_labels
from .generating_model import GeneratingModel
from .remote_cache import RemoteCache

# Shape suffixes: B rows, T tokens, H hidden size, V vocabulary.


class DistributedCausalLM(GeneratingModel):
    """A causal language model over a swarm."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RemoteCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return float32 logits [B, T, V] of token ids [B, T] or embeddings [B, T, H].

        Continues `past_key_values` or the active session; otherwise this is one stateless pass, in
        which rows may be padded on the right. With `labels` [B, T], the output has the loss of
        predicting each token from the tokens before it, except tokens labelled -100: the mean or,
        with `num_items_in_batch`, the sum divided by it. `logits_to_keep` n > 0 returns only the
        last n tokens. In a stateless pass, gradients flow to trained prompts, and to embeddings
        that require them. Raises UsageError for invalid input, before anything is sent.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if labels is not None and given is not None:
            check_labels(labels, given.shape[:2], self.config.vocab_size, logits_to_keep)
        is_count = isinstance(logits_to_keep, int)
        hidden_BTH, cache = self._run_text(
            input_ids, attention_mask, past_key_values, inputs_embeds,
            last_token_only=is_count and logits_to_keep == 1,
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if is_count else logits_to_keep
        normed_BTH = self.transformer.ln_f(hidden_BTH[:, kept])
        change_BTV = self.transformer.h.adapters.change_logits(normed_BTH)
        logits_BTV = self.lm_head(normed_BTH, change_BTV)
        loss = None
        if labels is not None:
            loss = ForCausalLMLoss(logits_BTV, labels, self.config.vocab_size, num_items_in_batch)  # pyright: ignore[reportArgumentType]
        output = CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=cache)  # pyright: ignore[reportArgumentType]
        return output if return_dict is not False else output.to_tuple()
