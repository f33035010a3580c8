"""The value of a decision of a run: how far the run has come, and by which gradients."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import RemoteProtocolError
from ..ids import MemberId, RunId
from ..limits import (
    MAX_MEMBER_ID_CHARACTERS,
    MAX_PARTS,
    MAX_RESTARTS,
    MAX_STAGES,
    MAX_UPDATES,
)
from .decisions import DIGEST_BYTES, Decision, Member
from .training_run import TrainingRun

_Digest = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * DIGEST_BYTES}}}$")]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RefusedPart(BaseModel):
    """A part of the update under way of which no member of a stage computes finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    index: Annotated[int, Field(ge=0, lt=MAX_PARTS)]
    stage: Annotated[int, Field(ge=0, lt=MAX_STAGES)]


class Commit(BaseModel):
    """The update that is under way, and what led to it: the sums of all stages before.

    A change of members repeats it, as only the newest decision is kept.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    founder: Annotated[str, Field(min_length=1, max_length=MAX_MEMBER_ID_CHARACTERS)]
    """The process that began this chain of decisions: a run may be begun again."""
    compute_class: _Digest
    """Of the machine that began the run. Others compute the same bits, or do not become members."""
    update: Annotated[int, Field(ge=0, le=MAX_UPDATES)]
    """Number of the update that is under way: so many were applied."""
    sums: Annotated[tuple[_Digest, ...], Field(max_length=MAX_STAGES, strict=False)] = ()
    """Of each stage, the digest of the sums of the update before."""
    squared_norm: _NotNegative = 0.0
    """Of the gradient of all stages together, in the update before."""
    loss: _NotNegative = 0.0
    """Of the update before, in nats per token."""
    averaging_seconds: _NotNegative = 0.0
    """How long the leader has waited for the sums of the update before."""
    queue_seconds: Annotated[
        tuple[_NotNegative, ...], Field(max_length=MAX_STAGES, strict=False)
    ] = ()
    """How long a part has waited at each stage for its turns to be computed, lately."""
    parts_redone: Annotated[int, Field(ge=0, le=2**31)] = 0
    """How many parts of the update before were computed again, as their members were lost."""
    held_out_loss: _NotNegative | None = None
    """Of the model as it is before the update under way, in nats per token, once it is measured."""
    num_restarts: Annotated[int, Field(ge=0, lt=MAX_RESTARTS)] = 0
    """How often the update under way was begun again: nothing that was counted before counts."""
    refused: RefusedPart | None = None
    """What has ended the run before its last update."""

    @property
    def failure(self) -> str | None:
        """Why the run has ended before its last update; None: it has not."""
        if self.refused is None:
            return None
        return (
            f"the run has stopped: the loss or gradients of part {self.refused.index} of update "
            f"{self.update} are not finite at stage {self.refused.stage}, whichever peer computes "
            "them; lower the learning rate"
        )

    def lacks_held_out_loss(self, run: TrainingRun) -> bool:
        """Return whether the held-out loss has to be measured before the run goes on."""
        return self.held_out_loss is None and run.has_held_out_loss(self.update)

    def is_last(self, run: TrainingRun) -> bool:
        """Return whether nothing is left to compute."""
        return self.update >= run.num_updates and not self.lacks_held_out_loss(run)

    def make_next(self, **facts: Any) -> Commit:
        """Return the commit of the update that is under way, with what is told of it."""
        founder, compute_class = self.founder, self.compute_class
        return Commit(founder=founder, compute_class=compute_class, update=self.update + 1, **facts)

    def make_restarted(self) -> Commit:
        """Return the beginning of the update that is under way, again: some of it is wrong.

        One that was begun again too often goes on as it is.
        """
        num_restarts = min(self.num_restarts + 1, MAX_RESTARTS - 1)
        return self.model_copy(update={"num_restarts": num_restarts})

    def make_measured(self, held_out_loss: float) -> Commit:
        """Return this commit with the held-out loss, which it lacked."""
        return self.model_copy(update={"held_out_loss": held_out_loss})

    def make_stopped(self, index: int, stage: int) -> Commit:
        """Return the end of the run by a part that all members of a stage refuse."""
        return self.model_copy(update={"refused": RefusedPart(index=index, stage=stage)})

    def encode(self) -> bytes:
        """Return the value of a decision."""
        return self.model_dump_json().encode()


def read_commit(decision: Decision) -> Commit:
    """Return the commit in a decision. Raises RemoteProtocolError where there is none."""
    try:
        return Commit.model_validate_json(decision.value)
    except ValidationError as error:
        raise RemoteProtocolError(f"decision {decision.number} has no valid value") from error


def found_run(run_id: RunId, founder: MemberId, stage: int, compute_class: str) -> Decision:
    """Return the first decision of a run, which names the peer that begins it."""
    commit = Commit(founder=founder, compute_class=compute_class, update=0)
    return Decision(0, bytes.fromhex(run_id), (Member(founder, stage),), commit.encode())
