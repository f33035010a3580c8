"""What a client does with a session of a chain beside stepping it: admit, redirect, and so on."""

import hmac

from ...protocol.errors import ErrorCode, RefusedError
from ...protocol.ids import NO_CAPABILITY, Capability
from ...protocol.messages.session import Admit, Attach, Mirror, Probe, Redirect, Step
from .answers import encode_refusal, encode_status
from .held_session import HeldSession

Steering = Admit | Redirect | Mirror | Probe


def steer(message: Steering, held: HeldSession | None) -> bytes:
    """Do what the client of a session says; return the answer."""
    num_replayed = 0
    try:
        if held is None:
            raise RefusedError(ErrorCode.UNKNOWN_SESSION, "the session was not opened here")
        if isinstance(message, Admit):
            held.state.admit(message.epoch)
            held.capability = message.capability
        elif isinstance(message, Redirect):
            num_replayed = held.outlet.redirect(
                message.next, message.resume_sequence, held.state.length
            )
        elif isinstance(message, Mirror):
            num_replayed = held.outlet.mirror(message.next)
    except RefusedError as error:
        return encode_refusal(message.session, 0, error)
    return encode_status(message.session, held, num_replayed)


def check_attach(message: Attach, held: HeldSession | None) -> HeldSession:
    """Return the session that another peer may push to. Raises RefusedError; it does not say why:
    whoever tries capabilities learns nothing.
    """
    if held is None or not may_push(message.capability, held):
        raise RefusedError(ErrorCode.UNKNOWN_SESSION, "the session is not open for you here")
    return held


def check_epoch(step: Step, held: HeldSession) -> None:
    """Refuse what another peer pushes ahead of the client: only the client counts epochs.

    The session would keep an epoch that a hop made up, and drop all that others push after it.
    """
    if step.epoch > held.state.epoch:
        raise RefusedError(
            ErrorCode.BAD_FRAME,
            f"a step of epoch {step.epoch} was pushed, the client has admitted {held.state.epoch}",
        )


def may_push(shown: Capability, held: HeldSession) -> bool:
    """Return whether a stream that has shown a capability may step a session."""
    return held.capability != NO_CAPABILITY and hmac.compare_digest(shown, held.capability)
