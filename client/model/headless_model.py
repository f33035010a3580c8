"""A model over a swarm without a head, and with other heads than for text: classifiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.modeling_outputs import BaseModelOutputWithPast, SequenceClassifierOutputWithPast

from ...protocol.errors import UsageError
from .base_model import DistributedModel
from .inputs import PROBLEM_TYPES, check_classes, count_labels, find_last_tokens
from .local_layers import LocalLayers
from .remote_blocks import RemoteSequential
from .remote_cache import RemoteCache

# Shape suffixes: B rows, T tokens, H hidden size, C classes.


class HeadlessModel(DistributedModel):
    """Token ids in, hidden states after the final norm out."""

    accepts_loss_kwargs = False

    def _add_head(self, layers: LocalLayers, generation_config: GenerationConfig | None) -> None:
        self.final_norm = layers.final_norm

    @property
    def h(self) -> RemoteSequential:
        """The remote blocks; in PETALS they are an attribute of this kind of model."""
        return self.transformer.h

    @property
    def word_embeddings(self) -> nn.Embedding:
        """The token embedding."""
        return self.transformer.word_embeddings

    @property
    def word_embeddings_layernorm(self) -> nn.Module:
        """The norm after the embedding."""
        return self.transformer.word_embeddings_layernorm

    @property
    def ln_f(self) -> nn.Module:
        """The norm after the last block."""
        return self.final_norm

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RemoteCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Return hidden states [B, T, H] of token ids [B, T] or embeddings [B, T, H].

        Continues `past_key_values` or the active session; otherwise this is one stateless pass, in
        which rows may be padded on the right.
        """
        hidden_BTH, cache = self._run_text(
            input_ids, attention_mask, past_key_values, inputs_embeds
        )
        hidden_BTH = self.final_norm(hidden_BTH)
        output = BaseModelOutputWithPast(last_hidden_state=hidden_BTH, past_key_values=cache)
        return output if return_dict is not False else output.to_tuple()


class DistributedSequenceClassifier(HeadlessModel):
    """Predicts which of `config.num_labels` classes a text belongs to, from its last token.

    The head, `score`, is local, trainable and in float32.
    """

    def _add_head(self, layers: LocalLayers, generation_config: GenerationConfig | None) -> None:
        super()._add_head(layers, generation_config)
        self.num_labels = count_labels(self.config)
        self.score = nn.Linear(self.config.hidden_size, self.num_labels, bias=False)
        nn.init.normal_(self.score.weight, std=getattr(self.config, "initializer_range", 0.02))

    @classmethod
    def _take_options(cls, options: dict[str, Any]) -> Callable[[PreTrainedConfig], None]:
        names = ("num_labels", "problem_type", "id2label", "label2id")
        taken = {name: options.pop(name) for name in names if name in options}
        num_labels, problem_type = taken.get("num_labels"), taken.get("problem_type")
        if num_labels is not None and (not isinstance(num_labels, int) or num_labels < 1):
            raise UsageError(f"num_labels is a whole number of at least 1, not {num_labels!r}")
        if problem_type not in (None, *PROBLEM_TYPES):
            raise UsageError(
                f"problem_type is one of {', '.join(PROBLEM_TYPES)}, not {problem_type!r}"
            )

        def configure(config: PreTrainedConfig) -> None:
            for name, value in taken.items():
                setattr(config, name, value)

        return configure

    def _list_settings(self) -> dict[str, object]:
        settings = super()._list_settings()
        return {
            **settings, "num_labels": self.num_labels, "problem_type": self.config.problem_type
        }  # fmt: skip

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RemoteCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Return logits [B, C] of texts, from the last token of each that is not padding.

        `labels` add the loss that transformers computes for the `problem_type` of the
        configuration: class numbers [B], several classes at once [B, C], or regression targets.
        Raises UsageError for invalid input, before anything is sent.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if labels is not None and given is not None:
            labels = check_classes(labels, len(given), self.config)
        last_B = find_last_tokens(
            input_ids, inputs_embeds, attention_mask, self.config.pad_token_id
        )
        hidden_BTH, cache = self._run_text(
            input_ids, attention_mask, past_key_values, inputs_embeds
        )
        rows_B = torch.arange(len(hidden_BTH), device=hidden_BTH.device)
        hidden_B1H = self.final_norm(hidden_BTH[rows_B, last_B.to(hidden_BTH.device), None])
        logits_BC = self.score(hidden_B1H[:, 0].to(self.score.weight.dtype))
        loss = None
        if labels is not None:
            loss = ForSequenceClassificationLoss(labels, logits_BC, self.config)
        output = SequenceClassifierOutputWithPast(
            loss=loss, logits=logits_BC, past_key_values=cache  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        return output if return_dict is not False else output.to_tuple()
