"""What PEFT's `adapter_config.json` says of a LoRA adapter, as far as it is understood here.

And how PEFT names the two matrices of a linear.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

MAX_RANK = 1024

PREFIX = "base_model.model."
"""Before the name that a linear has in transformers."""

DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""Behind it: from its inputs to the rank, and from there to its outputs."""

_PLAIN_FIELDS: Mapping[str, tuple[object, ...]] = {
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "use_dora": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, [], ()),
    "layer_replication": (None,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    # The others begin at base weights that they change.
    "init_lora_weights": (None, True, False, "gaussian"),
    "loftq_config": (None, {}),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
}
"""What changes how an adapter is applied, with the values that change nothing."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What the product of both matrices is multiplied by follows from this, and their sizes."""

    rank: int
    alpha: float
    uses_root: bool = False
    """Whether that is `alpha / rank ** 0.5` (`use_rslora`), and not `alpha / rank`."""

    @property
    def scale(self) -> float:
        """What the product of both matrices is multiplied by.

        >>> LoraConfig(4, 8).scale, LoraConfig(4, 8, uses_root=True).scale
        (2.0, 4.0)
        """
        return self.alpha / (self.rank**0.5 if self.uses_root else self.rank)

    def to_json(self, mark: str = "") -> bytes:
        """Return the file, with nothing in it that does not matter to who applies the adapter.

        A `mark` tells adapters apart that are the same otherwise.
        """
        fields = {
            "lora_alpha": self.alpha,
            "peft_type": "LORA",
            "r": self.rank,
            "use_rslora": self.uses_root,
        }
        if mark:
            fields["mark"] = mark
        return json.dumps(fields).encode()


def parse_lora_config(data: bytes) -> tuple[LoraConfig, dict[str, Any]]:
    """Return what a file says, and all of its fields.

    Raises ValueError with half a sentence about what is not supported.
    """
    try:
        fields: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("adapter_config.json is not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError("adapter_config.json does not describe a LoRA adapter of PEFT")
    fields = cast("dict[str, Any]", fields)
    if fields.get("peft_type") != "LORA":
        raise ValueError("adapter_config.json does not describe a LoRA adapter of PEFT")
    for name, plain in _PLAIN_FIELDS.items():
        if fields.get(name) not in plain:
            raise ValueError(f"{name} = {fields[name]!r:.60} is not supported")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ValueError(f"its rank r must be a number from 1 to {MAX_RANK}, not {rank!r:.60}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= 1e6:
        raise ValueError(f"lora_alpha must be a number, not {alpha!r:.60}")
    uses_root = fields.get("use_rslora") or False
    if not isinstance(uses_root, bool):
        raise ValueError(f"use_rslora must be true or false, not {uses_root!r:.60}")
    return LoraConfig(rank, alpha, uses_root), fields
