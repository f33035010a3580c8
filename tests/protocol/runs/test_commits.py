"""The values of decisions: what is none of a run is refused."""

import pytest

from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.ids import MemberId
from shoal.protocol.limits import MAX_RESTARTS
from shoal.protocol.runs.commits import Commit, read_commit
from shoal.protocol.runs.decisions import Decision, Member

COMMIT = Commit(founder="a", compute_class="c1" * 32, update=1, sums=("0" * 64,), loss=1.5)


def decide(value: bytes) -> Decision:
    return Decision(1, bytes(32), (Member(MemberId("a"), 0),), value)


def test_commit_is_what_was_decided() -> None:
    assert read_commit(decide(COMMIT.encode())) == COMMIT


def test_update_is_begun_again_no_oftener_than_a_decision_can_say() -> None:
    commit = COMMIT.make_restarted()
    assert commit.num_restarts == 1

    last = commit.model_copy(update={"num_restarts": MAX_RESTARTS - 1}).make_restarted()

    assert read_commit(decide(last.encode())) == last


@pytest.mark.parametrize("loss", [b"-1.5", b"1e999", b"NaN"])
def test_commit_of_an_impossible_loss_is_refused(loss: bytes) -> None:
    value = COMMIT.encode().replace(b"1.5", loss)

    with pytest.raises(RemoteProtocolError, match="decision 1 has no valid value"):
        read_commit(decide(value))
