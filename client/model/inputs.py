"""Checks of what a caller gives to a model: token ids, masks, lengths and labels.

Shape suffixes: B rows, T tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...protocol.errors import UsageError

IGNORED = -100
"""The label of a token that is not to be predicted, in torch and in transformers."""

_ONE, _SEVERAL, _NUMBERS = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)
PROBLEM_TYPES = (_ONE, _SEVERAL, _NUMBERS)

_CHANGING_ROTATIONS = ("longrope", "dynamic")
"""Kinds of rope whose rotation of all tokens changes once a text is long."""


def check_token_ids(ids: object, vocab_size: int) -> Tensor:
    """Return token ids as int64 [B, T]; UsageError if they are anything else."""
    if not isinstance(ids, Tensor):
        raise UsageError(
            f"token ids must be a tensor, got {type(ids).__name__}; a tokenizer returns one "
            'with return_tensors="pt"'
        )
    if ids.ndim != 2 or ids.shape[0] == 0:
        raise UsageError(f"token ids must have the shape [rows, tokens], got {list(ids.shape)}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UsageError(f"token ids must be whole numbers, got {ids.dtype}")
    lowest, highest = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if lowest < 0 or highest >= vocab_size:
        raise UsageError(
            f"token ids must be from 0 to {vocab_size - 1}, got {lowest} to {highest}; does the "
            "tokenizer belong to this model?"
        )
    return ids.long()


def check_attention_mask(mask: Tensor | None) -> None:
    """Raise UsageError unless the mask attends to everything: peers know no padding."""
    if mask is not None and not isinstance(mask, Tensor):
        raise UsageError(f"the attention mask must be a tensor, got {type(mask).__name__}")
    if mask is not None and not bool((mask == 1).all()):
        raise UsageError(
            "the attention mask hides tokens, but remote blocks do not support padding; give "
            "prompts of different lengths one at a time, or grouped by length"
        )


def check_padding(mask_BT: Tensor | None, shape: Sequence[int]) -> None:
    """Raise UsageError unless a mask hides only the ends of rows.

    The end of a row changes nothing before it, so peers need no mask.
    """
    if mask_BT is None:
        return
    if not isinstance(mask_BT, Tensor) or tuple(mask_BT.shape) != tuple(shape):
        given = list(mask_BT.shape) if isinstance(mask_BT, Tensor) else type(mask_BT).__name__
        raise UsageError(
            f"the attention mask must have the shape of the inputs, {list(shape)}, not {given}"
        )
    if not bool(((mask_BT == 0) | (mask_BT == 1)).all()):
        raise UsageError("the attention mask may only contain 0 and 1")
    if bool((mask_BT[:, 1:] > mask_BT[:, :-1]).any()):
        raise UsageError(
            "the attention mask hides tokens on the left, which remote blocks do not support; pad "
            "on the right (tokenizer.padding_side = 'right'), where padding changes nothing"
        )


def check_positions(num_tokens: int, model_config: PreTrainedConfig) -> None:
    """Raise UsageError for more tokens than the model has positions."""
    maximum = getattr(model_config, "max_position_embeddings", None)
    if maximum is not None and num_tokens > maximum:
        positions = describe_positions(model_config, maximum)
        raise UsageError(f"{num_tokens} tokens are too many: {positions}")


def describe_positions(model_config: PreTrainedConfig, max_positions: int) -> str:
    """Return how many positions a model has, and why that may be fewer than its card says."""
    rope = getattr(model_config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in _CHANGING_ROTATIONS:
        return f"the model has {max_positions} positions"
    return (
        f"the model has {max_positions} positions here: beyond them its {rope['rope_type']} rope "
        "would change keys that are already cached, which shoal does not support"
    )


def check_labels(
    labels_BT: Tensor, shape: Sequence[int], vocab_size: int, logits_to_keep: object
) -> None:
    """Raise UsageError unless labels are token ids of this vocabulary, or ignored."""
    if not isinstance(labels_BT, Tensor) or tuple(labels_BT.shape) != tuple(shape):
        given = list(labels_BT.shape) if isinstance(labels_BT, Tensor) else type(labels_BT).__name__
        raise UsageError(f"labels must have the shape of the inputs, {list(shape)}, not {given}")
    if labels_BT.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"labels must be whole numbers, not {labels_BT.dtype}")
    if not isinstance(logits_to_keep, int) or logits_to_keep != 0:
        raise UsageError("labels need the logits of all tokens; leave logits_to_keep out")
    is_wrong_BT = (labels_BT != IGNORED) & ((labels_BT < 0) | (labels_BT >= vocab_size))
    if bool(is_wrong_BT.any()):
        row, token = is_wrong_BT.nonzero()[0].tolist()
        raise UsageError(
            f"label {int(labels_BT[row, token])} of row {row}, token {token} is out of range: "
            f"labels are token ids from 0 to {vocab_size - 1}, or {IGNORED} for tokens without a "
            "loss"
        )


def count_labels(config: PreTrainedConfig) -> int:
    """Return the number of classes of a configuration; the default is two."""
    return 2 if config.num_labels is None else config.num_labels


def _find_problem_type(labels: Tensor, config: PreTrainedConfig) -> str:
    """Return the kind of problem, inferred as in transformers if the configuration has none."""
    if config.problem_type is not None:
        return config.problem_type
    if config.num_labels == 1:
        return _NUMBERS
    return _ONE if labels.dtype in (torch.int64, torch.int32) else _SEVERAL


def check_classes(labels: Tensor, num_rows: int, config: PreTrainedConfig) -> Tensor:
    """Return labels as the loss takes them; raises UsageError that names the first wrong one."""
    if not isinstance(labels, Tensor):
        raise UsageError(f"labels must be a tensor, not {type(labels).__name__}")
    num_labels = count_labels(config)
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


def find_last_tokens(
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
