"""What `shoal finetune`, or PEFT, left in a folder, for those who generate text with it."""

from pathlib import Path
from typing import Any

from ..protocol.errors import UsageError

_PROMPTS_FILE, _LORA_FILE = "tuning.json", "adapter_config.json"


def find_adapter(folder: Path | None) -> dict[str, Any]:
    """Return the arguments of from_pretrained() that open a model with what a folder holds.

    Raises UsageError when it holds nothing that was learned. Whether that fits the model is seen
    when it is opened.
    """
    if folder is None:
        return {}
    if (folder / _PROMPTS_FILE).is_file():
        return {"trained": folder}
    if (folder / _LORA_FILE).is_file():
        return {"active_adapter": folder}
    if not folder.is_dir():
        raise UsageError(
            f"there is no folder {folder}; --adapter takes what `shoal finetune` wrote"
        )
    raise UsageError(
        f"{folder} holds neither an adapter nor prompts: --adapter takes the folder that was "
        "--out of `shoal finetune`, or one that PEFT saved"
    )
