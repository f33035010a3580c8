"""The passes of a part through one stage, from the bytes that come to those that go on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....kernels.wire_tensors import has_only_finite
from ....models.token_shards import TokenShards
from ....protocol.runs.training_run import PartId, TrainingRun
from ....protocol.runs.update_parts import PART_DIGEST_BYTES
from .part_tensors import count_bytes, decode, encode
from .trainable_span import NotFiniteError, PartResult, TrainableSpan


class PartPasses:
    """What a stage computes of parts, on the thread that computes."""

    def __init__(
        self, run: TrainingRun, shards: TokenShards, span: TrainableSpan, stage: int
    ) -> None:
        self.stage = stage
        self._run = run
        self._shards = shards
        self._span = span
        self._shape = (
            run.rows_per_part, run.corpus.sequence_length, span.modules.hidden_size,
        )  # fmt: skip

    @property
    def input_bytes(self) -> int:
        """How many bytes come with a part; none at the first stage."""
        return 0 if self._span.modules.is_first else self.output_bytes

    @property
    def output_bytes(self) -> int:
        """How many bytes go on to the next stage, and come back as gradients."""
        return count_bytes(self._run.mode, self._shape)

    @property
    def held_out_bytes(self) -> int:
        """How many bytes come with a held-out part, in every mode."""
        return 0 if self._span.modules.is_first else count_bytes("exact", self._shape)

    @property
    def counting(self) -> Sequence[Callable[..., object]]:
        """The passes that this span runs of each part before the part counts."""
        if self._span.modules.is_last:
            return (PartPasses.run_loss,)
        return PartPasses.run_forward, PartPasses.run_backward

    def run_forward(self, part: PartId, payload: bytes | memoryview) -> bytes:
        """Return the outputs of a part."""
        return encode(
            self._run.mode, self._span.run_forward(part, self._read_inputs(part, payload))
        )

    def run_backward(
        self, part: PartId, payload: bytes | memoryview, outputs: bytes
    ) -> tuple[bytes, bytes]:
        """Count a part by the gradients of its outputs; return the gradients of its inputs, and the
        digest of all that was computed.
        """
        grads = decode(self._run.mode, payload, self._shape)
        return self._encode_result(part, outputs, self._span.run_backward(part, grads))

    def run_loss(self, part: PartId, payload: bytes | memoryview) -> tuple[bytes, bytes, float]:
        """Count a part at the last stage; return the same, and the loss."""
        inputs, labels = self._read_inputs(part, payload), self._read_labels(part)
        result = self._span.run_loss(part, inputs, labels)
        assert result.loss is not None
        return *self._encode_result(part, b"", result), result.loss

    def run_audit(
        self, part: PartId, payload: bytes | memoryview, grads: bytes | memoryview
    ) -> bytes:
        """Return the digest of all that is computed of a part, and count nothing."""
        try:
            inputs, target = self._read_inputs(part, payload), self._read_target(part, grads)
            hidden, result = self._span.audit(part, inputs, target)
        except NotFiniteError:
            return bytes(PART_DIGEST_BYTES)  # no member that has counted the part has this digest
        outputs = b"" if self._span.modules.is_last else encode(self._run.mode, hidden)
        _, digest = self._encode_result(part, outputs, result)
        return digest

    def discount(
        self, part: PartId, payload: bytes | memoryview, grads: bytes | memoryview
    ) -> None:
        """Take a part out of the sums."""
        self._span.discount(part, self._read_inputs(part, payload), self._read_target(part, grads))

    def evaluate(self, update: int, index: int, payload: bytes | memoryview) -> bytes | float:
        """Return the activations of a held-out part; at the last stage, its loss."""
        inputs, labels = self._shards.read_held_out(self._run, index)
        if not self._span.modules.is_first:
            inputs = decode("exact", payload, self._shape)
        if self._span.modules.is_last:
            return self._span.evaluate_loss(update, inputs, labels)
        return encode("exact", self._span.evaluate(update, inputs))

    def is_finite(self, payload: bytes | memoryview) -> bool:
        """Return whether gradients of outputs are finite."""
        return has_only_finite(decode(self._run.mode, payload, self._shape))

    def _read_target(self, part: PartId, grads: bytes | memoryview) -> Tensor:
        """Return what a backward pass begins with."""
        if self._span.modules.is_last:
            return self._read_labels(part)
        return decode(self._run.mode, grads, self._shape)

    def _read_inputs(self, part: PartId, payload: bytes | memoryview) -> Tensor:
        if self._span.modules.is_first:
            return self._shards.read_part(self._run, part)[0]
        return decode(self._run.mode, payload, self._shape)

    def _read_labels(self, part: PartId) -> Tensor:
        return self._shards.read_part(self._run, part)[1]

    def _encode_result(
        self, part: PartId, outputs: bytes, result: PartResult
    ) -> tuple[bytes, bytes]:
        """Return the bytes of the gradients of the inputs, which all replicas round alike, and the
        digest of all that was computed.
        """
        input_grads = b""
        if result.input_grads_BTH is not None:
            seed = self._run.derive_seed("rounding", part.update, part.index, self.stage)
            generator = torch.Generator().manual_seed(seed)
            input_grads = encode(self._run.mode, result.input_grads_BTH, generator)
        digest = hashlib.sha256(result.gradients_digest)
        for each in (outputs, input_grads, repr(result.loss).encode()):
            digest.update(each)
        return input_grads, digest.digest()[:PART_DIGEST_BYTES]
