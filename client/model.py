"""What a Python user touches: a causal language model whose blocks are on other machines.

It is a transformers model: generate() is transformers' own, over embedding, norm and head that
are local and blocks that are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from .client import Connect, connect_over_network
from .finetune.batches import check_labels, check_padding
from .generating_model import GeneratingModel
from .generation import append_text, check_attention_mask
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
        which rows may be padded on the right. `labels` [B, T] add the loss of predicting each
        token from those before it, but not -100: the mean, or, given `num_items_in_batch`, the sum
        divided by it. `logits_to_keep` n > 0 returns the last n tokens' only. Gradients flow back
        to trained prompts, and to embeddings that ask for them, in a stateless pass. Nothing is
        sent if an input is refused with UsageError.
        """
        embeddings_BTH = self._embed(input_ids, inputs_embeds)
        cache = self._find_cache(past_key_values)
        if cache is None:
            check_padding(attention_mask, embeddings_BTH.shape[:2])
        else:
            check_attention_mask(attention_mask)
        if labels is not None:
            check_labels(labels, embeddings_BTH.shape[:2], self.config.vocab_size, logits_to_keep)

        is_count = isinstance(logits_to_keep, int)
        last_token_only = is_count and logits_to_keep == 1
        text_position = 0 if cache is None else cache.get_seq_length()
        hidden_BTH = self._run_blocks(embeddings_BTH, cache, last_token_only=last_token_only)
        if cache is not None and past_key_values is None and input_ids is not None:
            append_text(cache.session, text_position, input_ids.long())

        kept = slice(-logits_to_keep, None) if is_count else logits_to_keep
        logits_BTV = self.lm_head(self.transformer.ln_f(hidden_BTH[:, kept]))
        loss = None
        if labels is not None:
            loss = ForCausalLMLoss(logits_BTV, labels, self.config.vocab_size, num_items_in_batch)  # pyright: ignore[reportArgumentType]
        output = CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=cache)  # pyright: ignore[reportArgumentType]
        return output if return_dict is not False else output.to_tuple()


class AutoDistributedModelForCausalLM:
    """Finds the right class for a model directory or Hub id; never constructed itself."""

    @staticmethod
    def from_pretrained(
        model: str | Path,
        *,
        initial_peers: Sequence[str] | str = (),
        torch_dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        connect: Connect = connect_over_network,
        **client_config: Any,
    ) -> DistributedCausalLM:
        """Open a model and join its swarm: see DistributedCausalLM.from_pretrained()."""
        return DistributedCausalLM.from_pretrained(
            model,
            initial_peers=initial_peers,
            torch_dtype=torch_dtype,
            revision=revision,
            connect=connect,
            **client_config,
        )
