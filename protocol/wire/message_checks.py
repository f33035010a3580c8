"""What every message must satisfy beyond its types, the same for those we send and receive.

One check per message, in one table. A check raises ValueError; `wire` says whose fault it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .. import limits
from ..endpoints import check_endpoint
from ..identity import SIGNATURE_BYTES
from ..ids import CAPABILITY_BYTES, CLIENT_TOKEN_BYTES, MODEL_ID_CHARACTERS, OFFER_NONCE_BYTES
from ..messages.session import (
    Admit,
    Attach,
    Close,
    Declined,
    Gap,
    Hello,
    HopSeconds,
    Leaving,
    Message,
    Mirror,
    NextHop,
    Offer,
    Open,
    Opened,
    Output,
    Parked,
    Pass,
    Passed,
    PassPiece,
    Probe,
    Queued,
    Redirect,
    Status,
    Step,
    Welcome,
)
from ..spans import Span
from ..tensors import check_tensor
from .adapter_checks import ADAPTER_CHECKS, check_adapter, check_adapter_rows
from .field_checks import check_count, check_seconds, check_session


def check_message(message: Message) -> None:
    """Raise ValueError unless the message may be on the wire."""
    _CHECKS[type(message)](message)


def check_text(value: str) -> None:
    """Raise ValueError for a text that is long, or that could steer the terminal it is shown on.

    >>> check_text("the peer is about to leave")
    >>> check_text("\x1b[2J")
    Traceback (most recent call last):
    ...
    ValueError: a text has characters that cannot be printed
    """
    if len(value) > limits.MAX_TEXT_CHARACTERS:
        raise ValueError(f"a text of {len(value)} characters is too long")
    if not value.isprintable():
        raise ValueError("a text has characters that cannot be printed")


def clean_text(value: str) -> str:
    """Return a text as `check_text` accepts it: cut, and without what cannot be printed.

    >>> clean_text("two\\nlines")
    'two lines'
    """
    cut = value[: limits.MAX_TEXT_CHARACTERS]
    return "".join(character if character.isprintable() else " " for character in cut)


def _check_model_id(value: str) -> None:
    if len(value) != MODEL_ID_CHARACTERS or not value.isalnum() or not value.isascii():
        raise ValueError("malformed model id")


def _check_span(span: Span) -> None:
    if span.stop > limits.MAX_BLOCKS:
        raise ValueError(f"block {span.stop} is beyond {limits.MAX_BLOCKS}")


def _check_position(value: int) -> None:
    if not 0 <= value <= limits.MAX_SESSION_TOKENS:
        raise ValueError(f"position {value} is beyond {limits.MAX_SESSION_TOKENS}")


def _check_pass(message: Pass) -> None:
    check_session(message.pass_id)
    _check_model_id(message.model_id)
    _check_span(message.span)
    check_count(message.num_rows, limits.MAX_BATCH_ROWS, "number of rows")
    check_count(message.num_tokens, limits.MAX_PASS_TOKENS, "number of tokens")
    check_count(message.num_rows * message.num_tokens, limits.MAX_PASS_TOKENS, "size of a pass")
    check_adapter_rows(message)
    rows, tokens = message.prompt_rows, message.prompt_tokens
    if (rows, tokens) == (0, 0):
        return
    if rows not in (1, message.num_rows) or not 0 < tokens <= message.num_tokens:
        raise ValueError(
            f"{rows} rows of {tokens} deep prompts do not fit {message.num_rows} rows of "
            f"{message.num_tokens} tokens"
        )
    num_prompts = len(message.span) * rows * tokens
    check_count(num_prompts, limits.MAX_PASS_PROMPTS, "number of deep prompts")


def _check_pass_piece(message: PassPiece) -> None:
    check_session(message.pass_id)
    check_tensor(message.tensor)
    if message.tensor.rows != 1:
        raise ValueError(f"a piece is one row of vectors, not {message.tensor.rows}")
    check_count(message.offset + 1, limits.MAX_PASS_PROMPTS, "offset")


def _check_passed(message: Passed) -> None:
    check_session(message.pass_id)
    check_seconds(message.queue_seconds, message.compute_seconds)


def _check_hello(message: Hello) -> None:
    check_text(message.software)
    if len(message.client) not in (0, CLIENT_TOKEN_BYTES):
        raise ValueError(
            f"a client's name has {CLIENT_TOKEN_BYTES} bytes, not {len(message.client)}"
        )


def _check_welcome(message: Welcome) -> None:
    check_text(message.software)
    check_text(message.peer_id)
    _check_model_id(message.model_id)
    _check_span(message.span)
    check_seconds(message.wall_seconds)
    if len(message.nonce) not in (0, OFFER_NONCE_BYTES):
        raise ValueError(f"a nonce has {OFFER_NONCE_BYTES} bytes, not {len(message.nonce)}")


def _check_open(message: Open) -> None:
    check_session(message.session)
    _check_model_id(message.model_id)
    _check_span(message.span)
    check_count(message.num_rows, limits.MAX_BATCH_ROWS, "number of rows")
    check_count(message.max_tokens, limits.MAX_SESSION_TOKENS, "session length")
    check_seconds(message.max_wait_seconds)
    _check_parent(message)
    check_adapter(message.adapter)
    _check_session_prompts(message)
    if message.capability:
        _check_capability(message.capability)
    _check_next(message.next, message.session)


def _check_session_prompts(message: Open) -> None:
    rows, tokens = message.prompt_rows, message.prompt_tokens
    if (rows, tokens) == (0, 0):
        return
    if rows not in (1, message.num_rows):
        raise ValueError(f"{rows} rows of deep prompts do not fit {message.num_rows} rows")
    check_count(tokens, message.max_tokens, "length of deep prompts")
    num_prompts = len(message.span) * rows * tokens
    check_count(num_prompts, limits.MAX_PASS_PROMPTS, "number of deep prompts")


def _check_parent(message: Open) -> None:
    if message.parent is None:
        if message.prefix_tokens:
            raise ValueError("a prefix has a parent")
        return
    check_session(message.parent)
    if message.parent == message.session:
        raise ValueError("a session cannot be its own parent")
    check_count(message.prefix_tokens, message.max_tokens, "prefix length")


def _check_queued(message: Queued) -> None:
    check_session(message.session)
    check_seconds(message.wait_seconds)


def _check_opened(message: Opened) -> None:
    check_session(message.session)
    check_seconds(message.queue_seconds)


def _check_step(message: Step) -> None:
    check_session(message.session)
    _check_position(message.position)
    check_tensor(message.hidden)
    num_rows, row_map = message.hidden.rows, message.row_map
    if row_map is not None and (
        len(row_map) != num_rows or not all(0 <= row < num_rows for row in row_map)
    ):
        raise ValueError(f"the row map does not fit {num_rows} rows")
    _check_before(message.before)


def _check_output(message: Output) -> None:
    check_session(message.session)
    _check_position(message.position)
    check_tensor(message.hidden)
    check_seconds(message.queue_seconds, message.compute_seconds)
    _check_before(message.before)


def _check_gap(message: Gap) -> None:
    check_session(message.session)
    _check_position(message.length)


def _check_bare(message: Close | Leaving | Probe) -> None:
    check_session(message.session)


def _check_declined(message: Declined) -> None:
    if message.session is not None:
        check_session(message.session)
    if message.retry_after_seconds is not None:
        check_seconds(message.retry_after_seconds)


def _check_before(before: Sequence[HopSeconds]) -> None:
    if len(before) > limits.MAX_HOPS:
        raise ValueError(f"{len(before)} hops are more than a route may have")
    for seconds in before:
        check_seconds(*seconds)


def _check_capability(value: bytes) -> None:
    if len(value) != CAPABILITY_BYTES:
        raise ValueError(f"a capability has {CAPABILITY_BYTES} bytes, not {len(value)}")


def _check_next(following: NextHop | None, session: bytes) -> None:
    if following is None:
        return
    check_text(following.peer_id)
    if len(following.endpoints) > limits.MAX_ENDPOINTS:
        raise ValueError(f"a next hop has at most {limits.MAX_ENDPOINTS} endpoints")
    for endpoint in following.endpoints:
        check_endpoint(endpoint)
    check_session(following.session)
    if following.session == session:
        raise ValueError("a session cannot be its own next hop")
    _check_capability(following.capability)


def _check_capability_holder(message: Attach | Admit) -> None:
    check_session(message.session)
    _check_capability(message.capability)


def _check_redirect(message: Redirect | Mirror) -> None:
    check_session(message.session)
    _check_next(message.next, message.session)


def _check_status(message: Status) -> None:
    check_session(message.session)
    _check_position(message.length)


def _check_offer(message: Offer) -> None:
    check_text(message.peer_id)
    if len(message.signature) != SIGNATURE_BYTES:
        raise ValueError(f"a signature has {SIGNATURE_BYTES} bytes, not {len(message.signature)}")


def _check_nothing(message: Parked) -> None:
    """There is nothing in it."""


_CHECKS: dict[type[Message], Callable[[Any], None]] = {
    Hello: _check_hello,
    Welcome: _check_welcome,
    Open: _check_open,
    Queued: _check_queued,
    Opened: _check_opened,
    Step: _check_step,
    Output: _check_output,
    Gap: _check_gap,
    Close: _check_bare,
    Declined: _check_declined,
    Attach: _check_capability_holder,
    Admit: _check_capability_holder,
    Redirect: _check_redirect,
    Probe: _check_bare,
    Status: _check_status,
    Leaving: _check_bare,
    Mirror: _check_redirect,
    Offer: _check_offer,
    Parked: _check_nothing,
    Pass: _check_pass,
    PassPiece: _check_pass_piece,
    Passed: _check_passed,
    **ADAPTER_CHECKS,
}
