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
from .local_layers import IGNORED, LocalLayers, check_padding
from .remote_blocks import RemoteSequential
from .remote_cache import RemoteCache, name_cache, one_cache

# Shape suffixes: B rows, T tokens, H hidden size, C classes.

_ONE, _SEVERAL, _NUMBERS = _PROBLEM_TYPES = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)


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

    def forward(self, *inputs: Any, **options: Any) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Return hidden states [B, T, H]: see DistributedTransformer.forward()."""
        return self.transformer(*inputs, **options)


class DistributedSequenceClassifier(HeadlessModel):
    """Predicts which of `config.num_labels` classes a text belongs to, from its last token.

    The head, `score`, is local, trainable and in float32.
    """

    def _add_head(self, layers: LocalLayers, generation_config: GenerationConfig | None) -> None:
        super()._add_head(layers, generation_config)
        self.num_labels = _count_labels(self.config)
        self.score = nn.Linear(self.config.hidden_size, self.num_labels, bias=False)
        nn.init.normal_(self.score.weight, std=getattr(self.config, "initializer_range", 0.02))

    @classmethod
    def _take_options(cls, options: dict[str, Any]) -> Callable[[PreTrainedConfig], None]:
        names = ("num_labels", "problem_type", "id2label", "label2id")
        taken = {name: options.pop(name) for name in names if name in options}
        num_labels, problem_type = taken.get("num_labels"), taken.get("problem_type")
        if num_labels is not None and (not isinstance(num_labels, int) or num_labels < 1):
            raise UsageError(f"num_labels must be a whole number of at least 1, not {num_labels!r}")
        if problem_type not in (None, *_PROBLEM_TYPES):
            raise UsageError(
                f"problem_type must be one of {', '.join(_PROBLEM_TYPES)}, not {problem_type!r}"
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
        cache: RemoteCache | None = None,
        **others: object,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Return logits [B, C] of texts, from the last token of each that is not padding.

        `labels` add the loss that transformers computes for the `problem_type` of the
        configuration: class numbers [B], several classes at once [B, C], or regression targets.
        Raises UsageError for invalid input, before anything is sent.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if labels is not None and given is not None:
            labels = _check_classes(labels, len(given), self.config)
        last_B = _find_last_tokens(
            input_ids, inputs_embeds, attention_mask, self.config.pad_token_id
        )
        given_cache = one_cache(cache, past_key_values)
        hidden_BTH, cache = self.transformer.run_text(
            input_ids, attention_mask, given_cache, inputs_embeds, others
        )
        rows_B = torch.arange(len(hidden_BTH), device=hidden_BTH.device)
        hidden_B1H = self.final_norm(hidden_BTH[rows_B, last_B.to(hidden_BTH.device), None])
        logits_BC = self.score(hidden_B1H[:, 0].to(self.score.weight.dtype))
        loss = None
        if labels is not None:
            loss = ForSequenceClassificationLoss(labels, logits_BC, self.config)
        output = SequenceClassifierOutputWithPast(
            loss=loss, logits=logits_BC, **name_cache(cache)
        )  # fmt: skip
        return output if return_dict is not False else output.to_tuple()


def _count_labels(config: PreTrainedConfig) -> int:
    """Return the number of classes of a configuration; the default is two."""
    return 2 if config.num_labels is None else config.num_labels


def _find_problem_type(labels: Tensor, config: PreTrainedConfig) -> str:
    """Return the kind of problem, inferred as in transformers if the configuration has none."""
    if config.problem_type is not None:
        return config.problem_type
    if config.num_labels == 1:
        return _NUMBERS
    return _ONE if labels.dtype in (torch.int64, torch.int32) else _SEVERAL


def _check_classes(labels: Tensor, num_rows: int, config: PreTrainedConfig) -> Tensor:
    """Return labels as the loss takes them; raises UsageError that names the first wrong one."""
    if not isinstance(labels, Tensor):
        raise UsageError(f"labels must be a tensor, not {type(labels).__name__}")
    num_labels = _count_labels(config)
    problem_type = _find_problem_type(labels, config)
    takes_one = problem_type == _ONE or (problem_type == _NUMBERS and num_labels == 1)
    shapes = [(num_rows,), (num_rows, 1)] if takes_one else [(num_rows, num_labels)]
    if tuple(labels.shape) not in shapes:
        raise UsageError(
            f"labels for {problem_type} of {num_rows} rows have the shape {list(shapes[0])}, "
            f"not {list(labels.shape)}"
        )
    if problem_type == _ONE:
        _check_each_class(labels, num_labels)
        return labels.long()
    if problem_type == _SEVERAL and not bool(((labels >= 0) & (labels <= 1)).all()):
        raise UsageError("multi-label targets must be numbers from 0 to 1")
    if not bool(torch.isfinite(labels).all()):
        raise UsageError("the labels contain NaN or infinity")
    return labels.float()


def _check_each_class(labels: Tensor, num_labels: int) -> None:
    if labels.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"labels must be class indices of an integer type, not {labels.dtype}")
    classes_B = labels.flatten()
    is_wrong_B = (classes_B != IGNORED) & ((classes_B < 0) | (classes_B >= num_labels))
    if bool(is_wrong_B.any()):
        row = int(is_wrong_B.nonzero()[0])
        raise UsageError(
            f"label {int(classes_B[row])} of row {row} is out of range: this classifier has "
            f"{num_labels} labels, 0 to {num_labels - 1}; open it with another num_labels"
        )


def _find_last_tokens(
    ids_BT: Tensor | None,
    embeddings: Tensor | None,
    mask_BT: Tensor | None,
    pad_token_id: int | None,
) -> Tensor:
    """Return for each row the index of its last token that is not padding.

    The mask decides if there is one, else the padding token. Raises UsageError without both, and
    for a row of padding only.
    """
    given = ids_BT if ids_BT is not None else embeddings
    if given is None:
        raise UsageError("the model takes either input_ids or inputs_embeds")
    num_rows, num_tokens = given.shape[:2]
    check_padding(mask_BT, given.shape[:2])
    if mask_BT is not None:
        is_text_BT = mask_BT == 1
    elif ids_BT is not None and pad_token_id is not None:
        is_text_BT = ids_BT != pad_token_id
    elif num_rows == 1:
        return torch.tensor([num_tokens - 1])
    else:
        raise UsageError(
            "cannot find the end of each row: pass an attention_mask, or set config.pad_token_id"
        )
    if not bool(is_text_BT.any(1).all()):
        raise UsageError(f"row {int((~is_text_BT.any(1)).nonzero()[0])} contains only padding")
    places_T = torch.arange(num_tokens, device=is_text_BT.device)
    return (places_T * is_text_BT).argmax(1)
