"""What texts are classified as, and by which of their tokens.

Tensor suffixes: B rows, T tokens, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...protocol.errors import UsageError
from .batch_checks import IGNORED, check_padding

_ONE, _SEVERAL, _NUMBERS = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)
PROBLEM_TYPES = (_ONE, _SEVERAL, _NUMBERS)


def count_labels(config: PreTrainedConfig) -> int:
    """Return how many classes a configuration has; two, if it says nothing."""
    return 2 if config.num_labels is None else config.num_labels


def _find_problem_type(labels: Tensor, config: PreTrainedConfig) -> str:
    """Return the kind of problem, as transformers guesses it where nobody said."""
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
        raise UsageError("labels of several classes at once are 0 or 1 for each, or in between")
    if not bool(torch.isfinite(labels).all()):
        raise UsageError("the labels contain NaN or infinity")
    return labels.float()


def _check_each_class(labels: Tensor, num_labels: int) -> None:
    if labels.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"labels are numbers of classes, whole numbers, not {labels.dtype}")
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
    """Return for each row the index of its last token that is no padding.

    The mask tells, where there is one, else the padding token. Raises UsageError where neither
    does, and for a row that is nothing but padding.
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
