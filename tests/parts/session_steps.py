"""Steps for the session table."""

from shoal.protocol.ids import SessionId
from shoal.protocol.messages.session import Step
from shoal.protocol.tensors import WireDtype, WireTensor

SESSION = SessionId(b"s" * 16)


def make_step(
    sequence: int, position: int, num_tokens: int = 1, epoch: int = 1, num_rows: int = 1
) -> Step:
    data = bytes(2 * num_rows * num_tokens)
    hidden = WireTensor(WireDtype.BF16, num_rows, num_tokens, 1, data)
    return Step(SESSION, epoch, sequence, position, hidden)
