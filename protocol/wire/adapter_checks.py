"""What messages about adapters must satisfy beyond their types; each check raises ValueError."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from .. import limits
from ..ids import ADAPTER_ID_BYTES
from ..messages.adapters import (
    AdapterFetch,
    AdapterHead,
    AdapterKept,
    AdapterMeasure,
    AdapterMeasured,
    AdapterPiece,
    AdapterUpdate,
    AdapterWithdrawal,
    GatherOrder,
    GradientSum,
    OptimizerKind,
    OptimizerSettings,
)
from ..messages.session import Pass, PassKind
from .field_checks import check_count, check_number, check_seconds, check_session

_MOST_NUMBERS = 2**32
_MOST_SCALE = 2.0**200
"""Gradients travel times a power of two, so that 16 bits hold them."""

_LEAST_EPSILON = 1e-30


def check_adapter(value: bytes) -> None:
    """Raise ValueError unless this can be the digest of an adapter, or of none."""
    if len(value) not in (0, ADAPTER_ID_BYTES):
        raise ValueError(f"an adapter's digest has {ADAPTER_ID_BYTES} bytes, not {len(value)}")


def check_adapter_rows(message: Pass) -> None:
    """Raise ValueError unless what a pass says of adapters fits its rows."""
    if message.trains_adapters and message.kind is not PassKind.FORWARD:
        raise ValueError("that gradients will be asked for is said on the way there")
    if not message.adapters:
        if message.adapter_vectors or message.gather or message.trains_adapters:
            raise ValueError("gradients of adapters are asked for, and there are none")
        return
    num_rows = 0
    for run in message.adapters:
        check_adapter(run.adapter)
        check_count(run.num_rows, message.num_rows, "number of rows with an adapter")
        num_rows += run.num_rows
    if num_rows != message.num_rows:
        raise ValueError(f"adapters of {num_rows} rows do not fit {message.num_rows} rows")
    if message.adapter_vectors:
        bound = limits.MAX_PASS_ADAPTERS if message.kind is PassKind.BACKWARD else 0
        check_count(message.adapter_vectors, bound, "gradients of adapters")
    if message.gather is not None:
        _check_gather(message, message.gather)


def _check_gather(message: Pass, order: GatherOrder) -> None:
    names = {run.adapter for run in message.adapters if run.adapter}
    if len(names) != 1 or message.adapter_vectors or message.kind is not PassKind.BACKWARD:
        raise ValueError("gradients are gathered of one adapter, on the way back, and not answered")
    check_count(order.number, _MOST_NUMBERS, "number of a sum")
    check_count(order.part, _MOST_NUMBERS - 1, "part of a sum")
    check_number(order.scale, 1 / _MOST_SCALE, _MOST_SCALE, "scale of gradients")


def _check_head(message: AdapterHead) -> None:
    check_session(message.upload_id)
    check_adapter(message.adapter)
    check_adapter(message.replaces)
    if not message.adapter:
        raise ValueError("an adapter that is brought has a digest")
    bound = limits.MAX_ADAPTER_BYTES * message.num_files
    check_count(message.num_bytes, bound, "size of an adapter")
    check_count(len(message.config), limits.MAX_ADAPTER_CONFIG_BYTES, "size of a configuration")
    if message.optimizer is OptimizerKind.NONE and message.num_updates:
        raise ValueError("what was updated has an optimizer")
    if message.optimizer and message.is_published:
        raise ValueError("an adapter that is published does not learn any more")
    check_number(message.num_trained, 0, limits.MAX_ADAPTER_BYTES, "number of trained numbers")
    if message.num_bytes % message.num_files:
        raise ValueError(f"{message.num_bytes} bytes are not {message.num_files} files of one size")


def _check_piece(message: AdapterPiece) -> None:
    check_session(message.upload_id)
    check_count(message.offset + 1, limits.MAX_TRAINED_BYTES, "offset")
    check_count(len(message.data), limits.MAX_CONTROL_BYTES, "size of a piece")


def _check_kept(message: AdapterKept) -> None:
    check_session(message.upload_id)
    check_seconds(message.keep_seconds)


def _check_sum(gradients: GradientSum, least_parts: int) -> None:
    check_adapter(gradients.adapter)
    if not gradients.adapter:
        raise ValueError("gradients belong to an adapter")
    check_count(gradients.number, _MOST_NUMBERS, "number of a sum")
    if not least_parts <= len(gradients.parts) <= limits.MAX_GRADIENT_PARTS:
        raise ValueError(f"a sum of {len(gradients.parts)} parts")
    if any(one >= other for one, other in pairwise((0, *gradients.parts))):
        raise ValueError("the parts of a sum stand in order, each once")


def _check_measure(message: AdapterMeasure) -> None:
    check_session(message.pass_id)
    _check_sum(message.gradients, least_parts=1)


def _check_measured(message: AdapterMeasured) -> None:
    check_session(message.pass_id)
    if not math.isfinite(message.square_sum) or message.square_sum < 0:
        raise ValueError(f"{message.square_sum} is no sum of squares")


def check_settings(settings: OptimizerSettings) -> None:
    """Raise ValueError unless these can be the numbers of an update."""
    check_number(settings.learning_rate, 0, limits.MAX_LEARNING_RATE, "learning rate")
    check_number(settings.weight_decay, 0, limits.MAX_LEARNING_RATE, "weight decay")
    if settings.kind is OptimizerKind.ADAMW:
        check_number(settings.epsilon, _LEAST_EPSILON, 1, "epsilon")
        fractions, unused = (settings.beta1, settings.beta2), (settings.momentum,)
    elif settings.kind is OptimizerKind.SGD:
        fractions = (settings.momentum,)
        unused = (settings.beta1, settings.beta2, settings.epsilon)
    else:
        raise ValueError("an update has an optimizer")
    for fraction in fractions:
        if not 0 <= fraction < 1:
            raise ValueError(f"{fraction} of what was before is outside 0 to 1")
    if any(unused):
        raise ValueError(f"{settings.kind.name} has no such settings")


def _check_update(message: AdapterUpdate) -> None:
    check_session(message.pass_id)
    _check_sum(message.gradients, least_parts=0)
    check_settings(message.settings)
    check_number(message.factor, 0, 1, "factor")


def _check_fetch(message: AdapterFetch) -> None:
    check_session(message.pass_id)
    check_adapter(message.adapter)
    if not message.adapter:
        raise ValueError("an adapter that is fetched has a digest")


def _check_withdrawal(message: AdapterWithdrawal) -> None:
    check_session(message.pass_id)
    check_adapter(message.adapter)
    if not message.adapter:
        raise ValueError("an adapter that is withdrawn has a digest")


ADAPTER_CHECKS: dict[type, Callable[[Any], None]] = {
    AdapterHead: _check_head,
    AdapterPiece: _check_piece,
    AdapterKept: _check_kept,
    AdapterMeasure: _check_measure,
    AdapterMeasured: _check_measured,
    AdapterUpdate: _check_update,
    AdapterFetch: _check_fetch,
    AdapterWithdrawal: _check_withdrawal,
}
