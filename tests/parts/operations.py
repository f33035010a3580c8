"""Counts instructions of the interpreter: a measure of cost that no busy machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_operations(call: Callable[[], object]) -> int:
    """Return how many instructions of Python a call runs. What C does within one counts as one."""
    num_operations = 0

    def note(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_operations
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        num_operations += event == "opcode"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_operations
