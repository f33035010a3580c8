"""What torch allocates while a test runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationSizes(TorchDispatchMode):
    """Notes the bytes of every new tensor, but not what an operation needs in between."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {_find_memory(item) for item in tree_leaves((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result):
            if isinstance(item, Tensor) and _find_memory(item) not in given:
                self.found.append(item.untyped_storage().nbytes())
        return result


def _find_memory(item: object) -> int | None:
    return item.untyped_storage().data_ptr() if isinstance(item, Tensor) else None
