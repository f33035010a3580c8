# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What hivemind asks about every record of the DHT: our gate knows."""

from __future__ import annotations

import warnings
from typing import Any

from .record_gate import RecordGate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.utils import MSGPackSerializer


class GateValidator(RecordValidatorBase):
    """Makes hivemind ask our gate before it stores anything or believes a replica."""

    def __init__(self, gate: RecordGate) -> None:
        self._gate = gate

    def validate(self, record: DHTRecord) -> bool:
        return self._gate.accept(record.key, record.subkey, record.value, record.expiration_time)

    def keep_valid(self, key: bytes, dictionary: Any) -> bool:
        """Remove what is not valid from a replica's DictionaryDHTValue and let the rest pass.

        hivemind would refuse the whole answer, so that one bad record hid all good ones. The
        maximal size also comes from the replica and ends in our own storage.
        """
        dictionary.maxsize = float("inf")
        for _ in range(2):  # of a long list, a later record may displace an earlier one
            for subkey, (value, expires_at) in list(dictionary.data.items()):
                is_typed = isinstance(subkey, str) and isinstance(value, bytes)
                if not is_typed or not self._gate.accept(
                    key, MSGPackSerializer.dumps(subkey), value, expires_at
                ):
                    del dictionary[subkey]
        return True
