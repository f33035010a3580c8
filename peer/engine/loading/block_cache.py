"""Quantized blocks on disk, so that a restart reads them in place of quantizing them again.

An entry is a safetensors file with the int8 weights of one block, before any kernel packs them: it
fits every processor. It is a hint and never trusted. Whatever is missing, damaged or not what the
block needs is made anew from the checkpoint, and a directory into which others can write is not
used.
"""

import contextlib
import hashlib
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ....kernels.linear.quantize import INT8_VERSION, Int8Weight, check_int8
from ....models.checkpoints.fingerprint import CACHE_DIRECTORY, write_atomically
from ....protocol.ids import ModelId

_logger = logging.getLogger(__name__)

BLOCKS_DIRECTORY = CACHE_DIRECTORY / "blocks"

MIN_ENTRY_BYTES = 2**20
"""Smaller blocks are quantized anew each time: it takes milliseconds."""

_CHECKSUM = "checksum"
_VALUES, _SCALES = ".values", ".scales"
_MAX_HEADER_BYTES = 2**20
"""Names and shapes of a block's tensors take some kilobytes, of many experts a few hundred."""


def open_block_cache(budget_bytes: int, directory: Path = BLOCKS_DIRECTORY) -> "BlockCache | None":
    """Return the cache in this directory; None, said in the log, where none can be had.

    A budget of 0 turns it off.
    """
    if budget_bytes == 0:
        return None
    try:
        directory = directory.expanduser()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = directory.stat()
        if state.st_uid != os.geteuid() or state.st_mode & 0o022:
            raise OSError(f"others can write into {directory}")
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        _warn(error)
        return None
    return BlockCache(directory, budget_bytes)


def name_entry(model_id: ModelId, block: int) -> str:
    """Return the file name of a block's entry: all that decides what is in it.

    >>> name_entry(ModelId("0123abcd"), 7)
    '0123abcd-7-int8-v1.safetensors'
    """
    return f"{model_id}-{block}-int8-v{INT8_VERSION}.safetensors"


class BlockCache:
    """The entries in one directory, which any number of processes share.

    They never take more than `budget_bytes`: the ones that were not used for longest make room.
    Entries that this object has used stay, so that a span larger than the budget does not throw
    away what the next start begins with.
    """

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._in_use: set[str] = set()
        self._is_writable = True

    def read(self, name: str, max_bytes: int) -> dict[str, Int8Weight]:
        """Return the weights of an entry, in memory of their own; empty if there is none.

        `max_bytes` is what the tensors of the block can take at most. An entry in any doubt is
        deleted.
        """
        path = self._directory / name
        try:
            content = _read_file(path, max_bytes + _MAX_HEADER_BYTES)
            weights = _decode(name, content)
        except FileNotFoundError:
            return {}
        except (OSError, SafetensorError, ValueError, LookupError) as error:
            _logger.info(
                "the cached block %s cannot be used and is quantized again: %s", path, error
            )
            with contextlib.suppress(OSError):
                path.unlink()
            return {}
        with contextlib.suppress(OSError):
            os.utime(path)  # used just now, for `_make_room`
        self._in_use.add(name)
        return weights

    def write(self, name: str, weights: Mapping[str, Int8Weight]) -> None:
        """Keep the weights of a block, if there is room; what goes wrong is said once."""
        num_bytes = sum(w.values_OI.nbytes + w.scales_O.nbytes for w in weights.values())
        if num_bytes < MIN_ENTRY_BYTES or not self._is_writable:
            return
        try:
            content = _encode(name, weights)
            if self._make_room(len(content)):
                write_atomically(self._directory / name, content)
                self._in_use.add(name)
        except FileNotFoundError:
            return  # another process made room where we were writing
        except OSError as error:
            self._is_writable = False
            _warn(error)

    def _make_room(self, num_bytes: int) -> bool:
        """Delete what was not used for longest until so many bytes are free, or return False.

        Partial files of a process that was killed are deleted like entries.
        """
        files = sorted(self._list_files(), key=lambda file: file[1].st_mtime_ns)
        free_bytes = self._budget_bytes - sum(state.st_size for _, state in files)
        others = [(path, state) for path, state in files if path.name not in self._in_use]
        if free_bytes + sum(state.st_size for _, state in others) < num_bytes:
            return False
        for path, state in others:
            if free_bytes >= num_bytes:
                break
            path.unlink(missing_ok=True)
            free_bytes += state.st_size
        return True

    def _list_files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process made room
                state = path.lstat()
                if not stat.S_ISDIR(state.st_mode):
                    yield path, state


def _warn(error: Exception) -> None:
    _logger.warning("quantized blocks cannot be cached for the next start: %s", error)


def _read_file(path: Path, max_bytes: int) -> bytes:
    """Return what a file holds; ValueError if it is too large. The directory is our own."""
    num_bytes = path.stat().st_size
    if num_bytes > max_bytes:
        raise ValueError(f"{num_bytes} bytes are more than the block can have")
    return path.read_bytes()


def _encode(name: str, weights: Mapping[str, Int8Weight]) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    for weight_name, weight in weights.items():
        tensors[weight_name + _VALUES] = weight.values_OI.contiguous()
        tensors[weight_name + _SCALES] = weight.scales_O.contiguous()
    checksum = _compute_checksum(name, tensors)
    return save({**tensors, _CHECKSUM: torch.frombuffer(checksum, dtype=torch.uint8)})


def _decode(name: str, content: bytes) -> dict[str, Int8Weight]:
    """Return the weights of an entry; ValueError or LookupError if it is none of this name."""
    tensors = load(content)
    checksum = tensors.pop(_CHECKSUM)
    if checksum.tolist() != list(_compute_checksum(name, tensors)):
        raise ValueError("its checksum is wrong")
    weights: dict[str, Int8Weight] = {}
    for tensor_name, values_OI in tensors.items():
        if tensor_name.endswith(_VALUES):
            weight_name = tensor_name.removesuffix(_VALUES)
            weights[weight_name] = Int8Weight(values_OI, tensors[weight_name + _SCALES])
            check_int8(weights[weight_name])
    if len(tensors) != 2 * len(weights):
        raise ValueError("it holds tensors of another kind")
    return weights


def _compute_checksum(name: str, tensors: Mapping[str, torch.Tensor]) -> bytearray:
    """Return the SHA-256 of an entry's name and of all its tensors with their names and shapes."""
    digest = hashlib.sha256(name.encode())
    for tensor_name, tensor in sorted(tensors.items()):
        digest.update(f"\n{tensor_name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().data)
    return bytearray(digest.digest())
