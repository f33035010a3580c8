"""The frames that answer a client, and what the state of a session learns with them."""

import asyncio
import logging
from copy import copy
from dataclasses import replace

from ...protocol.errors import ErrorCode, RefusedError
from ...protocol.ids import SessionId
from ...protocol.messages.session import Declined, Gap, Output, Status, Step
from ...protocol.wire.codec import encode_frame
from ..engine.compute_thread import ComputedStep
from .held_session import HeldSession
from .step_work import make_output, take_last_token

_logger = logging.getLogger(__name__)


def conclude(step: Step, held: HeldSession, future: asyncio.Future[ComputedStep]) -> bytes | None:
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
        if held.outlet.next is not None:
            return _push(step, held, output)
        frame = encode_frame(output)
    except RefusedError as error:
        refusal = copy(error)
    except Exception:
        _logger.exception("a step has no answer")
        refusal = RefusedError(ErrorCode.INTERNAL, "the peer failed to answer the step")
    else:
        held.state.complete(step.sequence, frame)
        return frame
    held.state.fail(step.sequence)
    return encode_refusal(step.session, step.sequence, refusal)


def _push(step: Step, held: HeldSession, output: Output) -> bytes | None:
    """Send an output to the next hop; the client gets the end of a replay, as a sign of life."""
    held.state.complete(step.sequence, b"")
    held.outlet.push(step, output)
    if held.outlet.is_pushed(step.sequence):
        return None
    return encode_frame(replace(output, hidden=take_last_token(output.hidden)))


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


def encode_refusal(session: SessionId | None, sequence: int, error: RefusedError) -> bytes:
    """Return the frame that refuses a step, a session (sequence 0) or the stream (no session)."""
    return encode_frame(
        Declined(session, sequence, error.code, str(error), error.retry_after_seconds)
    )
