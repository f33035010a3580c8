"""Steps of the wire to work for the engine, and what the engine made of them back to the wire."""

from torch import Tensor

from ...kernels.wire_tensors import decode_as, encode_as, has_only_finite
from ...protocol import limits
from ...protocol.errors import ErrorCode, RefusedError
from ...protocol.messages.session import Output, Step
from ...protocol.tensors import WireDtype, WireTensor, compute_num_bytes
from ..engine.engine import StepWork
from ..engine.jobs import ComputedStep
from .held_session import HeldSession

_MAX_ANSWER_BYTES = limits.MAX_FRAME_BYTES - limits.MAX_CONTROL_BYTES
"""The tensor of one answer; what is left of the frame is enough for everything else."""


def check_step_size(step: Step, dtype: WireDtype, hidden_size: int, is_pushed: bool) -> None:
    """Refuse, before a copy is made, a step that no engine could take or no frame answer.

    Raises RefusedError when its width is not the model's, when the answer, in the dtype of the
    session, is beyond one frame, or when more hops than a route may have were `before` this one.
    """
    rows, tokens, width = step.hidden.shape
    if width != hidden_size:
        raise RefusedError(
            ErrorCode.BAD_VALUES,
            f"hidden states of this model have size {hidden_size}, not {width}",
        )
    if is_pushed and len(step.before) >= limits.MAX_HOPS:
        raise RefusedError(
            ErrorCode.BAD_VALUES, f"a step went over {limits.MAX_HOPS} hops before it is pushed on"
        )
    num_tokens = 1 if step.last_token_only and not is_pushed else tokens
    if compute_num_bytes(dtype, rows, num_tokens, width) > _MAX_ANSWER_BYTES:
        raise RefusedError(
            ErrorCode.TOO_LONG, "the answer would not fit into one frame; send fewer tokens"
        )


def make_work(step: Step, held: HeldSession) -> StepWork:
    """Return what the engine has to do for a step; who pushes needs all of its tokens."""
    is_pushed = held.outlet.next is not None
    hidden_BTH = decode_as(step.hidden.dtype.name, step.hidden.data, step.hidden.shape)
    return StepWork(
        cache=held.cache,
        span=held.span,
        position=step.position,
        hidden_BTH=hidden_BTH,
        row_map=step.row_map,
        last_token_only=step.last_token_only and not is_pushed,
        decoded=step.is_decoded,
        adapter=None if held.adapter is None else held.adapter.adapter,
    )


def make_output(step: Step, dtype: WireDtype, computed: ComputedStep) -> Output:
    """Return the answer to a step; RefusedError when the session's dtype cannot hold it."""
    hidden_BTH = computed.hidden_BTH
    check_fits(hidden_BTH, dtype)
    rows, tokens, width = hidden_BTH.shape
    return Output(
        step.session,
        step.epoch,
        step.sequence,
        step.position,
        WireTensor(dtype, rows, tokens, width, encode_as(dtype.name, hidden_BTH)),
        computed.queue_seconds,
        computed.compute_seconds,
        step.before,
    )


def check_fits(hidden: Tensor, dtype: WireDtype) -> None:
    """Raise RefusedError when a dtype of the wire cannot hold these numbers."""
    if dtype is WireDtype.FP16 and not has_only_finite(hidden.half()):
        raise RefusedError(
            ErrorCode.BAD_VALUES,
            "these hidden states are too large for fp16 on the wire; choose bf16 or fp32",
        )


def take_last_token(hidden: WireTensor) -> WireTensor:
    """Return the last token of each row."""
    name, (rows, _, width) = hidden.dtype.name, hidden.shape
    hidden_BTH = decode_as(name, hidden.data, hidden.shape)[:, -1:]
    return WireTensor(hidden.dtype, rows, 1, width, encode_as(name, hidden_BTH))
