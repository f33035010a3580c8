"""A session that a peer holds: its steps from the wire to work for the engine, and their answers.

The update of a session's state after a step is here as well.
"""

import asyncio
import logging
from copy import copy
from dataclasses import dataclass, field, replace

from ...kernels.wire_tensors import decode_as, encode_as
from ...protocol import limits
from ...protocol.errors import ErrorCode, RefusedError
from ...protocol.fair_share import Tenant
from ...protocol.ids import NO_CAPABILITY, Capability, SessionId
from ...protocol.messages.codec import encode_frame
from ...protocol.messages.session import (
    Admit,
    Gap,
    Mirror,
    Open,
    Opened,
    Output,
    Probe,
    Redirect,
    Status,
    Step,
)
from ...protocol.session.session_state import SessionState
from ...protocol.tensors import WireDtype, WireTensor, compute_num_bytes
from ..engine.adapters.adapter_store import KeptAdapter
from ..engine.cache.kv_cache import SessionCache
from ..engine.steps import ComputedStep, StepWork
from ..pushing.session_outputs import SessionOutputs
from ..streams.client_stream import check_fits, encode_refusal
from ..streams.stream_host import ServiceCounts

_logger = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = limits.MAX_FRAME_BYTES - limits.MAX_CONTROL_BYTES
"""The tensor of one answer; what is left of the frame is enough for everything else."""


@dataclass(slots=True)
class HeldSession:
    """A session and its cache; closed by the stream that opened it.

    One with a `capability` is part of a chain: a peer has to show that before it pushes, and all
    answers go to the stream that opened the session.

    `used_at` is when it was last stepped, on any stream; the `tenant` opened it, see
    `fair_share`; `adapter` changes all of its rows. Times are those of the service's
    clock.
    """

    state: SessionState
    cache: SessionCache
    dtype: WireDtype
    opened_at: float
    tenant: Tenant
    outputs: SessionOutputs
    capability: Capability = NO_CAPABILITY
    adapter: KeptAdapter | None = None
    num_prompt_bytes: int = 0
    used_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.used_at = self.opened_at


def check_step_size(step: Step, dtype: WireDtype, hidden_size: int, has_next_hop: bool) -> None:
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
    if has_next_hop and len(step.before) >= limits.MAX_HOPS:
        raise RefusedError(
            ErrorCode.BAD_VALUES, f"a pushed step passed {limits.MAX_HOPS} hops, the most allowed"
        )
    num_tokens = 1 if step.last_token_only and not has_next_hop else tokens
    if compute_num_bytes(dtype, rows, num_tokens, width) > _MAX_ANSWER_BYTES:
        raise RefusedError(
            ErrorCode.TOO_LONG, "the answer would not fit into one frame; send fewer tokens"
        )


def make_work(step: Step, held: HeldSession) -> StepWork:
    """Return the engine's work for a step; a hop that pushes needs all of its tokens."""
    has_next_hop = held.outputs.next is not None
    hidden_BTH = decode_as(step.hidden.dtype.name, step.hidden.data, step.hidden.shape)
    return StepWork(
        cache=held.cache,
        position=step.position,
        hidden_BTH=hidden_BTH,
        row_map=step.row_map,
        last_token_only=step.last_token_only and not has_next_hop,
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


def take_last_token(hidden: WireTensor) -> WireTensor:
    """Return the last token of each row."""
    name, (rows, _, width) = hidden.dtype.name, hidden.shape
    hidden_BTH = decode_as(name, hidden.data, hidden.shape)[:, -1:]
    return WireTensor(hidden.dtype, rows, 1, width, encode_as(name, hidden_BTH))


def conclude(
    step: Step, held: HeldSession, future: asyncio.Future[ComputedStep], counts: ServiceCounts
) -> bytes | None:
    """Tell the session's state how a step ended, push its output if it is to be pushed, and return
    the answer to the client, if there is any.
    """
    try:
        failure = future.exception()
        if failure is not None:
            raise copy(failure)  # the future would keep it, with this frame and the step in it
        computed = future.result()
        if held.state.is_lost(step.sequence):
            # The engine does not know that the answer before this one could not be sent.
            held.state.fail(step.sequence)
            return encode_gap(step, held)
        output = make_output(step, held.dtype, computed)
        if held.outputs.next is not None:
            return _push(step, held, output)
        frame = encode_frame(output)
    except RefusedError as error:
        refusal = copy(error)
    except Exception:
        _logger.exception("a step was computed and its answer could not be made; it is refused")
        refusal = RefusedError(ErrorCode.INTERNAL, "the peer failed to answer the step")
    else:
        held.state.complete(step.sequence, frame)
        return frame
    held.state.fail(step.sequence)
    return encode_refusal(step.session, step.sequence, refusal, counts)


def _push(step: Step, held: HeldSession, output: Output) -> bytes | None:
    """Send an output to the next hop; the client gets the end of a replay, as a sign of life."""
    held.state.complete(step.sequence, b"")
    held.outputs.push(step, output)
    if held.outputs.is_pushed(step.sequence):
        return None
    return encode_frame(replace(output, hidden=take_last_token(output.hidden)))


def control(
    message: Admit | Redirect | Mirror | Probe, held: HeldSession | None, counts: ServiceCounts
) -> bytes:
    """Do what the client of a chain says beside stepping its session; return the answer."""
    num_replayed = 0
    try:
        if held is None:
            raise RefusedError(ErrorCode.UNKNOWN_SESSION, "the session was not opened here")
        if isinstance(message, Admit):
            held.state.admit(message.epoch)
            held.capability = message.capability
        elif isinstance(message, Redirect):
            num_replayed = held.outputs.redirect(
                message.next, message.resume_sequence, held.state.length
            )
        elif isinstance(message, Mirror):
            num_replayed = held.outputs.mirror(message.next)
    except RefusedError as error:
        return encode_refusal(message.session, 0, error, counts)
    return encode_status(message.session, held, num_replayed)


def encode_opened(message: Open, queue_seconds: float, free_tokens: int) -> bytes:
    """Return the frame that says that a session is open."""
    return encode_frame(Opened(message.session, message.epoch, queue_seconds, free_tokens))


def encode_status(session: SessionId, held: HeldSession, num_replayed: int = 0) -> bytes:
    """Return the frame that says how far a session is."""
    state = held.state
    return encode_frame(
        Status(
            session, state.epoch, state.sequence, state.length, state.done_sequence, num_replayed
        )
    )


def encode_gap(step: Step, held: HeldSession) -> bytes:
    """Return the frame that says where the session ends."""
    return encode_frame(Gap(step.session, step.epoch, step.sequence, held.state.length))
