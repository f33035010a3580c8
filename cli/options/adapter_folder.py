"""Reads `--adapter`: a folder written by `shoal finetune` or PEFT, or a digest."""

from pathlib import Path
from typing import Any

from ...protocol.errors import UsageError
from ...protocol.ids import ADAPTER_ID_BYTES, parse_adapter_id

_PROMPTS_FILE, _LORA_FILE = "tuning.json", "adapter_config.json"


def find_adapter(given: str | None) -> dict[str, Any]:
    """Return the arguments of from_pretrained() that open a model with an adapter or prompts.

    A digest may have capitals and white space around it; a folder with the same name has
    priority. Raises UsageError for anything else, and for a folder without trained weights. That
    the weights fit the model and that a peer has the digest is checked when they are used.
    """
    if given is None:
        return {}
    folder = Path(given)
    if (folder / _PROMPTS_FILE).is_file():
        return {"trained": folder}
    if (folder / _LORA_FILE).is_file():
        return {"active_adapter": folder}
    if folder.is_dir():
        raise UsageError(
            f"{folder} holds neither an adapter nor prompts: --adapter takes a folder written by "
            "`shoal finetune` or PEFT, or the digest of a published adapter"
        )
    if (adapter := parse_adapter_id(given)) is not None:
        return {"active_adapter": adapter.hex()}
    if folder.exists():
        raise UsageError(
            f"{folder} is a file; --adapter takes a folder written by `shoal finetune` or PEFT"
        )
    raise UsageError(
        f"{folder} is neither an existing folder nor the digest of a published adapter "
        f"({2 * ADAPTER_ID_BYTES} hexadecimal digits); --adapter takes one of them"
    )


def check_lora(folder: Path) -> None:
    """Raise UsageError unless a folder holds the files of a LoRA adapter; they are not opened."""
    if (folder / _LORA_FILE).is_file():
        return
    if (folder / _PROMPTS_FILE).is_file():
        raise UsageError(
            f"{folder} holds prompts (ptune, deep_ptune), which cannot be published; DIR must hold "
            "a LoRA adapter"
        )
    expected = "must be a folder with a LoRA adapter, written by `shoal finetune` or PEFT"
    if folder.is_dir():
        raise UsageError(f"{folder} holds no adapter: DIR {expected}")
    if folder.exists():
        raise UsageError(f"{folder} is a file; DIR {expected}")
    raise UsageError(f"there is no folder {folder}; DIR {expected}")
