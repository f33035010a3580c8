"""The frames that answer a client, and what the state of a session learns with them."""

import asyncio
import logging

from ..protocol.errors import ErrorCode, RefusedError
from ..protocol.ids import SessionId
from ..protocol.messages import Declined, Gap, Step
from ..protocol.wire import encode_frame
from .engine.compute_thread import ComputedStep
from .held_session import HeldSession
from .step_work import make_output

_logger = logging.getLogger(__name__)


def conclude(step: Step, held: HeldSession, future: asyncio.Future[ComputedStep]) -> bytes:
    """Tell the session's state how a step ended, and return the answer to it."""
    try:
        computed = future.result()
        if held.state.is_lost(step.sequence):
            # The engine does not know that the answer before this one could not be sent.
            held.state.fail(step.sequence)
            return encode_gap(step, held)
        frame = encode_frame(make_output(step, held.dtype, computed))
    except RefusedError as error:
        refusal = error
    except Exception:
        _logger.exception("a step has no answer")
        refusal = RefusedError(ErrorCode.INTERNAL, "the peer failed to answer the step")
    else:
        held.state.complete(step.sequence, frame)
        return frame
    held.state.fail(step.sequence)
    return encode_refusal(step.session, step.sequence, refusal)


def encode_gap(step: Step, held: HeldSession) -> bytes:
    """Return the frame that says where the session ends."""
    return encode_frame(Gap(step.session, step.epoch, step.sequence, held.state.length))


def encode_refusal(session: SessionId | None, sequence: int, error: RefusedError) -> bytes:
    """Return the frame that refuses a step, a session (sequence 0) or the stream (no session)."""
    return encode_frame(
        Declined(session, sequence, error.code, str(error), error.retry_after_seconds)
    )
