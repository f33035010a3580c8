"""Handles Ctrl-C, SIGTERM and the SIGHUP of a closed terminal in commands.

Imports next to nothing, because it is loaded before everything else; see `quit_at_once`.
"""

import contextlib
import functools
import os
import signal
from collections.abc import Iterator, Sequence

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells count: 128 + SIGINT."""


_ENDINGS = (signal.SIGTERM, signal.SIGHUP)

INTERRUPTED_FACTS = '{"error": "interrupted", "kind": "KeyboardInterrupt"}'
"""The last line of stdout after Ctrl-C with --json, like that of an error."""


def quit_at_once(is_json: bool = False, numbers: Sequence[int] = (signal.SIGINT,)) -> None:
    """Let Ctrl-C end the process at once from now on, quietly unless programs expect JSON.

    For times without anything to clean up, imports above all: a KeyboardInterrupt during an import
    would print a traceback of the imported library.
    """
    for number in numbers:
        signal.signal(number, functools.partial(_quit, is_json))


@contextlib.contextmanager
def quitting_at_once(is_json: bool = False) -> Iterator[None]:
    """Inside, as after `quit_at_once`; afterwards Ctrl-C raises KeyboardInterrupt as usual.

    Within `stop_on_sigterm`, this holds for SIGTERM and SIGHUP as well.
    """
    others = {number: signal.getsignal(number) for number in _ENDINGS}
    others = {number: one for number, one in others.items() if one in (_interrupt, _exit)}
    quit_at_once(is_json, (signal.SIGINT, *others))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, handler in others.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_on_sigterm(is_ctrl_c_another: bool = False) -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP too, so that `with` blocks clean up.

    Or SystemExit, where Ctrl-C means something else. What is ignored stays so, as nohup has it.
    Only for the main thread.
    """
    numbers = [one for one in _ENDINGS if signal.getsignal(one) is not signal.SIG_IGN]
    raises = _exit if is_ctrl_c_another else _interrupt
    previous = [signal.signal(number, raises) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and SIGHUP until the end of work that must not be cut short.

    Only for the main thread.
    """
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = [
        signal.signal(number, lambda number, frame: held.append(number)) for number in numbers
    ]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
    if held:
        raise KeyboardInterrupt


def _quit(is_json: bool, number: int, frame: object) -> None:
    with contextlib.suppress(OSError):  # whoever reads may be gone
        if os.isatty(2):
            os.write(2, b"\n")  # the line that ^C stands on
        if is_json:
            os.write(1, f"{INTERRUPTED_FACTS}\n".encode())
    os._exit(INTERRUPTED)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _exit(number: int, frame: object) -> None:
    raise SystemExit(INTERRUPTED)
