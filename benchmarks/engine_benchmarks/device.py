"""The engine on a device, and its kernels beside torch's, in one run.

    make bench BENCHMARKS=engine_benchmarks.device ARGS="--device cuda"

Steps are those of sessions in one engine, without a network, beside plain transformers in bf16 on
the same device, whose steps have embedding and head as well. Kernels are captured, as a step is:
otherwise the processor that launches them would be measured. Each weight has as many copies as
overflow the caches of the device, used in turn.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from measuring.benchmark_model import BenchmarkModel, make_benchmark_model, open_bundled_model
from shoal.cli.benchmarking.figure import describe_machine
from shoal.kernels.linear.quantize import Int8Weight, WeightFormat
from shoal.kernels.linear.select import choose_int8_kernel, choose_paged_attention
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.devices.cuda_device import choose_device
from shoal.peer.engine.devices.device import CallingCapturer, Capturer
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.engine.steps import StepWork
from shoal.protocol.errors import UsageError
from shoal.protocol.spans import Span

SHAPES = [(1024, 2816), (4096, 4096), (4096, 14336), (14336, 4096)]  # (in, out)
ROWS = [1, 2, 4, 16, 64, 512]
CACHE_BYTES = 256 * 2**20
"""More than the caches of any device that we measure on."""
COPIED_BYTES = 2**28
HEADS, GROUPS, HEAD_DIM, PAGE_TOKENS = 32, 8, 128, 16
SESSIONS_AND_TOKENS = [(1, 512), (1, 8192), (16, 512), (16, 4096), (64, 1024)]
LEAST_MM_ROWS = 17
"""Torch's integer product on a device takes no fewer."""
CONTEXT_TOKENS = 16
NUM_TRIALS = 5


@dataclass(frozen=True)
class Figure:
    """One measurement; microseconds, gigabytes, or steps or tokens per second."""

    what: str
    name: str
    value: float
    unit: str

    def __str__(self) -> str:
        return f"{self.what:<34}{self.name:<16}{self.value:>12.1f} {self.unit}"


class Clock:
    """Times work on a device, and waits for it."""

    def __init__(self, torch_device: torch.device, capturer: Capturer | None) -> None:
        self.torch_device = torch_device
        self._capturer = capturer or CallingCapturer()

    def time(self, call: Callable[[], object]) -> float:
        """Return the median seconds of a call, of some after a first one."""
        seconds: list[float] = []
        for _ in range(1 + NUM_TRIALS):
            self.wait()
            started_at = time.perf_counter()
            call()
            self.wait()
            seconds.append(time.perf_counter() - started_at)
        return median(seconds[1:])

    def time_each(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return the microseconds of one of several calls that are captured together."""

        def call_all() -> None:
            for call in calls:
                call()

        return self.time(self._capturer.capture(call_all)) / len(calls) * 1e6

    def wait(self) -> None:
        """Wait until the device has nothing to do."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)


def measure_bounds(engine: Engine, clock: Clock) -> Iterator[Figure]:
    """Measure how fast the device copies, and so how many steps it could read the weights for."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=clock.torch_device)
    target = torch.empty_like(source)
    seconds = clock.time(lambda: [target.copy_(source) for _ in range(10)]) / 10
    bytes_per_second = 2 * COPIED_BYTES / seconds
    yield Figure("reading and writing", "torch copy", bytes_per_second / 1e9, "GB/s")
    speed = bytes_per_second / engine.num_weight_bytes
    yield Figure("engine, sessions: 1", "weights read", speed, "steps/s")


def measure_linears(clock: Clock) -> Iterator[Figure]:
    """Measure int8 products of one and two digits beside torch's products."""
    for in_features, out_features in SHAPES:
        num_copies = 2 + CACHE_BYTES // (in_features * out_features)
        for name, dtype, make in list_products(in_features, out_features, clock.torch_device):
            products = [make() for _ in range(num_copies)]
            for num_rows in ROWS:
                if name == "torch int_mm" and num_rows < LEAST_MM_ROWS:
                    continue
                rows = (torch.randn(num_rows, in_features, device=clock.torch_device) * 30).to(
                    dtype
                )
                calls = [lambda product=product, rows=rows: product(rows) for product in products]
                what = f"{in_features} -> {out_features}, rows: {num_rows}"
                yield Figure(what, name, clock.time_each(calls), "us")
            del products


Product = Callable[[Tensor], object]


def list_products(
    in_features: int, out_features: int, torch_device: torch.device
) -> Iterator[tuple[str, torch.dtype, Callable[[], Product]]]:
    """Yield name, dtype of the rows, and what makes one copy of the layer."""
    shape = (out_features, in_features)
    values_OI = torch.randint(-127, 128, shape, dtype=torch.int8, device=torch_device)
    scales_O = torch.rand(out_features, device=torch_device)
    kernel = choose_int8_kernel(torch_device.type)

    def make_ours(num_digits: int) -> Product:
        product = kernel.pack(Int8Weight(values_OI.clone(), scales_O), None)
        return lambda rows: product.multiply(rows, num_digits)

    def make_int_mm() -> Product:
        weight = values_OI.clone().t()
        return lambda rows: torch._int_mm(  # pyright: ignore[reportPrivateImportUsage]
            rows, weight
        )

    def make_float(dtype: torch.dtype) -> Product:
        weight = values_OI.to(dtype)
        return lambda rows: F.linear(rows, weight)

    yield "ours, 2 digits", torch.float32, lambda: make_ours(2)
    yield "ours, 1 digit", torch.float32, lambda: make_ours(1)
    yield "torch int_mm", torch.int8, make_int_mm
    yield "torch bf16", torch.bfloat16, lambda: make_float(torch.bfloat16)
    yield "torch fp32", torch.float32, lambda: make_float(torch.float32)


def measure_attention(clock: Clock) -> Iterator[Figure]:
    """Measure generated tokens over pages beside torch over keys that lie in one piece."""
    for num_sessions, num_tokens in SESSIONS_AND_TOKENS:
        for name, call in list_attentions(num_sessions, num_tokens, clock.torch_device):
            what = f"{num_sessions} tokens, keys: {num_tokens}"
            yield Figure(what, name, clock.time_each([call] * 4), "us")


def list_attentions(
    num_sessions: int, num_tokens: int, torch_device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield name and call for one generated token of each session."""
    (attend, *_), scale = choose_paged_attention("cuda"), HEAD_DIM**-0.5
    num_pages = num_tokens // PAGE_TOKENS
    shape = (num_sessions * num_pages, 2, GROUPS, PAGE_TOKENS, HEAD_DIM + 8)
    pages = torch.randn(shape, device=torch_device)
    tables = torch.randperm(len(pages), device=torch_device).int().view(num_sessions, num_pages)
    lengths = torch.full((num_sessions,), num_tokens, dtype=torch.int32, device=torch_device)
    queries = torch.randn(num_sessions, HEADS, HEAD_DIM, device=torch_device)
    yield "ours", lambda: attend(queries, pages, tables, lengths, scale=scale)
    grouped = queries.view(num_sessions, GROUPS, -1, HEAD_DIM)
    states = torch.randn(2, num_sessions, GROUPS, num_tokens, HEAD_DIM, device=torch_device)
    for name, dtype in (("torch fp32", torch.float32), ("torch bf16", torch.bfloat16)):
        keys, values = states.to(dtype).unbind()
        yield (
            name,
            partial(F.scaled_dot_product_attention, grouped.to(dtype), keys, values, scale=scale),
        )


def measure_engine(
    engine: Engine, model: BenchmarkModel, clock: Clock, is_quick: bool
) -> Iterator[Figure]:
    """Measure steps of several sessions, and prompts."""
    num_steps = 8 if is_quick else 64
    for num_sessions in (1, 16, 64):
        works = [_open(engine, model.make_hidden(CONTEXT_TOKENS)) for _ in range(num_sessions)]
        _execute(engine, works)

        def decode(works: list[StepWork] = works) -> None:
            for _ in range(num_steps):
                steps = [_go_on(work, model.make_hidden(1)) for work in works]
                _execute(engine, steps)

        speed = num_steps * num_sessions / clock.time(decode)
        yield Figure(f"engine, sessions: {num_sessions}", "ours", speed, "steps/s")
        for work in works:
            work.cache.close()
    for num_tokens in (128, 512) if is_quick else (128, 512, 2048):
        work = _open(engine, model.make_hidden(num_tokens))
        speed = num_tokens / clock.time(lambda work=work: _execute(engine, [work]))
        yield Figure(f"engine, prompt: {num_tokens}", "ours", speed, "tok/s")
        work.cache.close()


def measure_transformers(model: BenchmarkModel, clock: Clock, is_quick: bool) -> Iterator[Figure]:
    """Measure the same with plain transformers."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.bfloat16)
    loaded.to(clock.torch_device)
    num_steps = 8 if is_quick else 64
    settings = {"max_new_tokens": num_steps, "min_new_tokens": num_steps, "do_sample": False}
    for num_rows in (1, 16, 64):
        tokens_BT = model.make_tokens(num_rows, CONTEXT_TOKENS).to(clock.torch_device)
        seconds = clock.time(
            lambda tokens_BT=tokens_BT: loaded.generate(tokens_BT, pad_token_id=0, **settings)
        )
        what = f"engine, sessions: {num_rows}"
        yield Figure(what, "transformers", num_steps * num_rows / seconds, "tok/s")
    for num_tokens in (128, 512) if is_quick else (128, 512, 2048):
        tokens_BT = model.make_tokens(1, num_tokens).to(clock.torch_device)
        seconds = clock.time(lambda tokens_BT=tokens_BT: loaded.model(tokens_BT))
        yield Figure(f"engine, prompt: {num_tokens}", "transformers", num_tokens / seconds, "tok/s")


def _open(engine: Engine, hidden_BTH: Tensor) -> StepWork:
    cache = engine.pool.open(1, engine.spec.max_positions, engine.span)
    return StepWork(cache, 0, hidden_BTH, last_token_only=True)


def _go_on(work: StepWork, hidden_BTH: Tensor) -> StepWork:
    return StepWork(work.cache, work.cache.length, hidden_BTH, decoded=True)


def _execute(engine: Engine, works: list[StepWork]) -> None:
    for result in engine.execute(works):
        if isinstance(result, Exception):
            raise result


@torch.inference_mode()
def main() -> None:
    """Measure everything and print a line for each figure as it comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", help="such as cuda:1 (default: %(default)s)")
    parser.add_argument("--weights", type=WeightFormat, default=WeightFormat.INT8)
    parser.add_argument("--quick", action="store_true", help="only see that the engine runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    try:
        device = choose_device(options.device)
    except UsageError as error:
        parser.error(str(error))
    torch.manual_seed(0)
    model = open_bundled_model() if options.quick else make_benchmark_model()
    clock = Clock(device.torch_device, device.capturer)
    figures: list[Figure] = []
    machine = describe_machine()
    if device.torch_device.type == "cuda":
        machine = f"{torch.cuda.get_device_name(device.torch_device)}; {machine}"
    with device.running():
        engine = load_engine(
            Checkpoint.open(model.directory), Span(0, model.num_blocks), options.weights,
            device=device, kv_budget_bytes=2**30,
        )  # fmt: skip
        if not options.json:
            print(f"{machine}\n{engine.kernels}\n")
        parts = [
            measure_bounds(engine, clock),
            measure_engine(engine, model, clock, options.quick),
            measure_transformers(model, clock, options.quick),
        ]
        if not options.quick:
            parts += [measure_linears(clock), measure_attention(clock)]
        for part in parts:
            for figure in part:
                figures.append(figure)
                if not options.json:
                    print(figure, flush=True)
    if options.json:
        result = {"machine": machine, "kernels": engine.kernels}
        print(json.dumps({**result, "figures": [asdict(figure) for figure in figures]}))


if __name__ == "__main__":
    main()
