# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What hivemind asks about every record of the DHT: our gate knows."""

from __future__ import annotations

import warnings

from .record_gate import RecordGate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase


class GateValidator(RecordValidatorBase):
    """Makes hivemind ask our gate before it stores anything."""

    def __init__(self, gate: RecordGate) -> None:
        self._gate = gate

    def validate(self, record: DHTRecord) -> bool:
        return self._gate.accept(record.key, record.subkey, record.value, record.expiration_time)
