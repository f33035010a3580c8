"""From a checkpoint to an engine: its blocks, rotary tables and KV memory."""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ....kernels.attention.rotary import RotaryTable
from ....kernels.linear.quantize import WeightFormat
from ....models.checkpoints.checkpoint import Checkpoint
from ....models.spec_reader import read_spec
from ....models.specs.model_spec import ModelShape
from ....protocol.errors import ModelError, UsageError
from ....protocol.spans import Span
from ..blocks.batch import HostedBlock
from ..cache.kv_cache import KVCachePool
from ..devices.cuda_device import choose_device
from ..devices.device import Device, Numerics
from ..engine import Engine
from ..training.numerics import set_num_threads
from .block_cache import BlockCache
from .loader import ReportProgress, load_span

# Parameters of mallopt(3) and the values that glibc's own dynamic rule would settle at.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LOADING_MMAP_BYTES = 2**20
_SERVING_MMAP_BYTES = 32 * 2**20
_SERVING_TRIM_BYTES = 64 * 2**20


def load_engine(
    checkpoint: Checkpoint,
    span: Span,
    weights: WeightFormat,
    *,
    device: str | Device = "cpu",
    kv_budget_bytes: int,
    num_threads: int | None = None,
    on_progress: ReportProgress | None = None,
    cache: BlockCache | None = None,
    kept: Mapping[int, HostedBlock] | None = None,
) -> Engine:
    """Load the blocks of `span`; raises ModelError or UsageError before reading weights.

    `device` is one, or its name for `choose_device`; `num_threads` sets torch's threads for the
    whole process; `on_progress(done, total)` counts blocks; `cache` spares quantizing blocks that
    were quantized before; `kept` are blocks of another engine that need not be loaded, by index.
    """
    if num_threads is not None:
        set_num_threads(num_threads)
    spec = read_spec(checkpoint.config)
    numerics = Numerics(weights, choose_device(device) if isinstance(device, str) else device)
    try:
        rotary = _build_rotary(spec, numerics)
        store = numerics.device.open_store(
            kv_budget_bytes, span, spec.num_kv_heads, spec.head_dim, numerics.dtype
        )
        pool = KVCachePool(kv_budget_bytes, store)
        # Not in inference mode: autograd could not use weights that were made there.
        with torch.no_grad(), _keep_large_tensors_apart():
            blocks = load_span(checkpoint, spec, span, numerics, on_progress, cache, kept)
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"{numerics.device.torch_device} has no memory for blocks {span} and {kv_budget_bytes} "
            "bytes of KV cache; serve fewer blocks (--num-blocks), or give sessions less "
            "memory (--kv-memory)"
        ) from error
    return Engine(spec, span, blocks, rotary, pool, numerics)


def _build_rotary(spec: ModelShape, numerics: Numerics) -> list[RotaryTable]:
    """Return one table for each of the model's ropes."""
    try:
        return [
            RotaryTable.build(spec.head_dim, spec.max_positions, rope).to(
                numerics.device.torch_device
            )
            for rope in spec.ropes
        ]
    except (ValueError, TypeError, LookupError) as error:
        raise ModelError(f"config.json: rotary parameters are not usable: {error}") from error


@contextmanager
def _keep_large_tensors_apart() -> Iterator[None]:
    """Inside, memory of dropped tensors over 1 MiB returns to the system at once, with glibc.

    Loading drops a float copy of every weight that it keeps in 8 bits. In one heap these leave
    holes between the weights: half as much again for the benchmark model. Serving wants the
    opposite, since fresh pages cost more than the product that is computed in them.
    """
    _set_malloc_option(_M_MMAP_THRESHOLD, _LOADING_MMAP_BYTES)
    try:
        yield
    finally:
        _set_malloc_option(_M_MMAP_THRESHOLD, _SERVING_MMAP_BYTES)
        _set_malloc_option(_M_TRIM_THRESHOLD, _SERVING_TRIM_BYTES)


def _set_malloc_option(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
