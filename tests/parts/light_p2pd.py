"""p2pd as most tests start it: unpacked, and without a table that none of them asks.

Each start of the one that hivemind brings unpacks 29 MB (UPX), and then builds a table of 79,009
IPv6 networks in memory. Its relay service, which no option leaves out, counts reservations from the
internet by them. That is half a second of a core and 70 MB, several hundred times, for processes
that live for seconds.

Here the same program is written to a file as it is when it has unpacked itself, with a table of
length 0: three bytes of its code differ. Plain processes, and tests about p2pd itself, start the
one that hivemind brings.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import BinaryIO

IS_POSSIBLE = (platform.system(), platform.machine()) == ("Linux", "x86_64")

_TRACEME, _PEEKUSER, _SYSCALL = 0, 3, 24
_INSTRUCTION_POINTER = 16 * 8  # in `struct user` of x86-64

_BOUND = bytes.fromhex("4881faa1340100")  # cmp rdx, 79009
_NO_BOUND = bytes.fromhex("4881fa00000000")

_HEADER_BYTES = 64

_system = ctypes.CDLL(None, use_errno=True)
_system.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_system.ptrace.restype = ctypes.c_long


def use() -> None:
    """Have hivemind start it from now on, in this process and those that are forked from it.

    It is made when it does not exist, beside the one that hivemind brings, which stays in use where
    that is not possible: on other processors, and for another version.
    """
    from hivemind import hivemind_cli
    from hivemind.p2p import p2p_daemon

    shipped = Path(hivemind_cli.__path__[0], p2p_daemon.P2PD_FILENAME)
    with contextlib.suppress(OSError, ValueError):
        p2p_daemon.P2PD_FILENAME = make(shipped).name


def make(shipped: Path) -> Path:
    """Write it to a file, unless it is there; return which. Raises ValueError or OSError."""
    if not IS_POSSIBLE:
        raise ValueError("only Linux on x86-64 is known")
    with shipped.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    light = shipped.with_name(f"p2pd-light-{digest[:12]}")
    if not light.exists():
        program = unpack(shipped)
        if program.count(_BOUND) != 1:
            raise ValueError("not the version of p2pd that is known")
        with tempfile.TemporaryDirectory(dir=shipped.parent) as folder:
            written = Path(folder, "p2pd")
            written.write_bytes(program.replace(_BOUND, _NO_BOUND))
            written.chmod(0o755)
            written.rename(light)
    return light


def unpack(packed: Path) -> bytes:
    """Return a program that unpacks itself, as it is when it has done so and not begun yet."""
    with subprocess.Popen(
        [packed, "-help"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: _system.ptrace(_TRACEME, 0, None, None),
    ) as process:
        try:
            start = _run_until_unpacked(process.pid)
            with open(f"/proc/{process.pid}/mem", "rb") as memory:
                return _copy_program(memory, start)
        finally:
            process.kill()


def _run_until_unpacked(pid: int) -> int:
    """Stop a traced process at the last system call before its own code; return where that is.

    What unpacks it makes the memory of its code executable only at the end, and makes this call
    from there.
    """
    while True:
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            raise ValueError("p2pd ended where it should have unpacked itself")
        address = _system.ptrace(_PEEKUSER, pid, _INSTRUCTION_POINTER, None)
        with open(f"/proc/{pid}/maps") as maps:
            places, rights = maps.readline().split()[:2]
        start, stop = (int(place, 16) for place in places.split("-"))
        if rights == "r-xp" and start <= address < stop:
            return start
        _system.ptrace(_SYSCALL, pid, None, None)


def _copy_program(memory: BinaryIO, start: int) -> bytes:
    """Return what the file of a program was of which the first byte lies at `start` in memory."""
    memory.seek(start)
    header = bytearray(memory.read(_HEADER_BYTES))
    (table,) = struct.unpack_from("<Q", header, 32)
    entry_bytes, num_entries = struct.unpack_from("<HH", header, 54)
    struct.pack_into("<Q", header, 40, 0)  # no table of sections: it is not loaded
    struct.pack_into("<HHH", header, 58, 0, 0, 0)
    memory.seek(start + table)
    program = bytearray()
    for entry in struct.iter_unpack("<8xQQ8xQ16x", memory.read(entry_bytes * num_entries)):
        offset, address, num_bytes = entry
        program += bytes(max(0, offset + num_bytes - len(program)))
        memory.seek(address)
        program[offset : offset + num_bytes] = memory.read(num_bytes)
    program[:_HEADER_BYTES] = header
    return bytes(program)
