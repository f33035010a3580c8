"""Linear layers and attention of prompts: our kernels beside torch's, in microseconds.

Each layer has as many copies as overflow the caches, used in turn: a peer reads every weight once
per token. Times are the least of many calls; `_int_mm` is the integer product alone, without
rounding rows before and scaling sums after. Parts of prompts attend on one thread, and their times
are those of the processor, the least of alternating calls.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle, repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.cli.benchmarking.figure import describe_machine
from shoal.kernels.attention.native_attention import (
    PromptAttention,
    TokenBatch,
    TokenSegment,
    TokenShape,
    choose_prompt_instruction_set,
)
from shoal.kernels.attention.rotary import apply_rotary
from shoal.kernels.attention.torch_attention import attention
from shoal.kernels.linear.quantize import Int8Kernel, Int8Weight
from shoal.kernels.linear.select import choose_int8_kernel

SHAPES = [(1024, 1024), (1024, 2816), (2816, 1024), (4096, 14336)]  # (in, out)
ROWS = [1, 2, 4, 8, 16, 32, 128, 512]
CACHE_BYTES = 64 * 2**20
"""More than the caches of the machines that we measure on."""
SECONDS_PER_CELL = 0.15
MIN_CALLS = 4
PROMPT_SHAPE = TokenShape(num_heads=16, num_groups=4, head_dim=64)
PROMPT_PARTS = [16, 64, 512]
PROMPT_POSITIONS = [0, 448, 3500]
TORCH_PART = 64
"""How many tokens a peer without the library attends with at a time."""

Product = Callable[[Tensor], object]


@dataclass(frozen=True)
class Cell:
    """One measurement; `name` is a column of the table."""

    in_features: int
    out_features: int
    num_threads: int
    num_rows: int
    name: str
    microseconds: float


def measure_microseconds(products: Iterator[Product], rows: Tensor) -> float:
    """Return the least time of a call, of as many as fit into the time for a cell."""
    next(products)(rows)
    best = float("inf")
    num_calls = 0
    deadline = time.perf_counter() + SECONDS_PER_CELL
    while num_calls < MIN_CALLS or time.perf_counter() < deadline:
        product = next(products)
        started_at = time.perf_counter()
        product(rows)
        best = min(best, time.perf_counter() - started_at)
        num_calls += 1
    return best * 1e6


def measure_read_gigabytes_per_second() -> float:
    """Return how fast torch reads memory with its present threads: the largest of many numbers."""
    numbers = torch.ones(2 * CACHE_BYTES // 4, dtype=torch.int32)
    return numbers.nbytes / measure_microseconds(repeat(torch.amax), numbers) / 1e3


def make_products(in_features: int, out_features: int, kernel: Int8Kernel) -> Iterator[
    tuple[str, torch.dtype, Callable[[], Product]]
]:  # fmt: skip
    """Yield the columns: name, dtype of the rows, and what makes one copy of the layer."""
    values_OI = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8)
    scales_O = torch.rand(out_features)
    ones_O = torch.ones(out_features, dtype=torch.bfloat16)

    def make_native(num_digits: int) -> Product:
        product = kernel.pack(Int8Weight(values_OI, scales_O), None)
        return lambda rows: product.multiply(rows, num_digits)

    def make_int8pack() -> Product:
        weight = values_OI.clone()
        return lambda rows: torch._weight_int8pack_mm(  # pyright: ignore[reportPrivateImportUsage]
            rows, weight, ones_O
        )

    def make_int_mm() -> Product:
        weight = values_OI.clone().t()
        return lambda rows: torch._int_mm(  # pyright: ignore[reportPrivateImportUsage]
            rows, weight
        )

    def make_float(dtype: torch.dtype) -> Product:
        weight = values_OI.to(dtype)
        return lambda rows: F.linear(rows, weight)

    yield "2 digits", torch.float32, lambda: make_native(2)
    yield "1 digit", torch.float32, lambda: make_native(1)
    yield "int8pack", torch.bfloat16, make_int8pack
    yield "int_mm", torch.int8, make_int_mm
    yield "bf16", torch.bfloat16, lambda: make_float(torch.bfloat16)
    yield "fp32", torch.float32, lambda: make_float(torch.float32)


def measure_shape(
    in_features: int, out_features: int, thread_counts: list[int], kernel: Int8Kernel
) -> Iterator[Cell]:
    """Measure every column of one shape; one column's copies are in memory at a time."""
    for name, dtype, make_product in make_products(in_features, out_features, kernel):
        num_copies = 2 + CACHE_BYTES // (in_features * out_features)
        products = cycle([make_product() for _ in range(num_copies)])
        for num_threads in thread_counts:
            torch.set_num_threads(num_threads)
            for num_rows in ROWS:
                rows = (torch.randn(num_rows, in_features) * 30).to(dtype)
                best = measure_microseconds(products, rows)
                yield Cell(in_features, out_features, num_threads, num_rows, name, best)


@dataclass(frozen=True)
class PromptCell:
    """One part of a prompt, in C and in torch."""

    num_tokens: int
    position: int
    native_microseconds: float
    torch_microseconds: float


def measure_prompts() -> Iterator[PromptCell]:
    """Measure parts of prompts; none without the kernel."""
    if choose_prompt_instruction_set() is None:
        return
    torch.set_num_threads(1)
    for num_tokens in PROMPT_PARTS:
        for position in PROMPT_POSITIONS:
            contestants = make_prompt_attentions(num_tokens, position)
            best = dict.fromkeys(contestants, float("inf"))
            deadline = time.perf_counter() + 4 * SECONDS_PER_CELL
            num_calls = 0
            while num_calls < MIN_CALLS or time.perf_counter() < deadline:
                for name, attend in contestants.items():
                    started_at = time.process_time()
                    attend()
                    best[name] = min(best[name], time.process_time() - started_at)
                num_calls += 1
            yield PromptCell(num_tokens, position, best["native"] * 1e6, best["torch"] * 1e6)


def make_prompt_attentions(num_tokens: int, position: int) -> dict[str, Callable[[], object]]:
    """Return both ways to rotate, write the cache and attend, for the same tokens."""
    heads, groups, head_dim = (
        PROMPT_SHAPE.num_heads,
        PROMPT_SHAPE.num_groups,
        PROMPT_SHAPE.head_dim,
    )
    stop = position + num_tokens
    states_LCBGSD = torch.randn(1, 2, 1, groups, stop, head_dim)
    fused_NO = torch.randn(num_tokens, (heads + 2 * groups) * head_dim)
    attended_NO = torch.empty(num_tokens, heads * head_dim)
    angles_TR = torch.randn(num_tokens, head_dim // 2).repeat(1, 2)
    cos_TR, sin_TR = angles_TR.cos(), angles_TR.sin()
    kernel = PromptAttention(0, PROMPT_SHAPE)
    batch = TokenBatch([TokenSegment(states_LCBGSD, 0, 0, position, cos_TR, sin_TR)])

    def attend_in_torch() -> None:
        keys_BGSD, values_BGSD = states_LCBGSD[0]
        heads_BJTD = fused_NO.view(1, num_tokens, -1, head_dim).transpose(1, 2)
        query_key_BJTD, values_BGTD = heads_BJTD.tensor_split([-groups], dim=1)
        query_key_BJTD = apply_rotary(query_key_BJTD, cos_TR, sin_TR)
        keys_BGSD[:, :, position:] = query_key_BJTD[:, heads:]
        values_BGSD[:, :, position:] = values_BGTD
        parts = [
            attention(
                query_key_BJTD[:, :heads, first:last],
                keys_BGSD[:, :, : position + last],
                values_BGSD[:, :, : position + last],
                position + first,
                scale=head_dim**-0.5,
            )
            for first in range(0, num_tokens, TORCH_PART)
            for last in (min(first + TORCH_PART, num_tokens),)
        ]
        torch.cat(parts, dim=2).transpose(1, 2).reshape(num_tokens, -1)

    return {"native": lambda: kernel(fused_NO, batch, attended_NO), "torch": attend_in_torch}


def print_prompts(cells: list[PromptCell]) -> None:
    """Print a row for each part."""
    if not cells:
        return
    print(f"attention of prompts, processor microseconds; {PROMPT_SHAPE}")
    print(f"{'tokens':>8}{'position':>10}{'in C':>10}{'torch':>10}")
    for cell in cells:
        times = f"{cell.native_microseconds:>10.0f}{cell.torch_microseconds:>10.0f}"
        print(f"{cell.num_tokens:>8}{cell.position:>10}{times}")


def print_tables(cells: list[Cell], read_speeds: dict[int, float]) -> None:
    """Print a table for each shape and number of threads."""
    names = list(dict.fromkeys(cell.name for cell in cells))
    by_place = {
        (cell.in_features, cell.out_features, cell.num_threads, cell.num_rows, cell.name): (
            cell.microseconds
        )
        for cell in cells
    }
    for in_features, out_features in SHAPES:
        for num_threads, read_speed in read_speeds.items():
            print(
                f"{in_features} -> {out_features}, threads: {num_threads}, "
                f"a plain read: {read_speed:.1f} GB/s"
            )
            print(f"{'rows':>6}", *(f"{name:>10}" for name in names), " 2 digits, GB/s")
            for num_rows in ROWS:
                place = (in_features, out_features, num_threads, num_rows)
                times = [by_place[*place, name] for name in names]
                speed = in_features * out_features / times[0] / 1e3
                print(f"{num_rows:>6}", *(f"{best:>10.0f}" for best in times), f"{speed:>15.1f}")
            print()


@torch.inference_mode()
def main() -> None:
    """Measure every shape and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.manual_seed(0)
    kernel = choose_int8_kernel("cpu")
    thread_counts = sorted({1, torch.get_num_threads()})
    read_speeds: dict[int, float] = {}
    for num_threads in thread_counts:
        torch.set_num_threads(num_threads)
        read_speeds[num_threads] = measure_read_gigabytes_per_second()
    cells = [
        cell
        for in_features, out_features in SHAPES
        for cell in measure_shape(in_features, out_features, thread_counts, kernel)
    ]
    prompts = list(measure_prompts())
    title = f"linear layers, microseconds; {kernel.name}"
    if options.json:
        figures = [asdict(cell) for cell in cells]
        result = {"title": title, "machine": describe_machine(), "figures": figures}
        result["prompts"] = [asdict(cell) for cell in prompts]
        print(json.dumps({**result, "read_gigabytes_per_second": read_speeds}))
        return
    print(f"{title}\n{describe_machine()}\n")
    print_tables(cells, read_speeds)
    print_prompts(prompts)


if __name__ == "__main__":
    main()
