"""How many blocks of a model fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.kernels.linear.quantize import ON_CPUS, WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.models.spec_reader import read_spec
from shoal.peer.engine.devices.device import Numerics
from shoal.peer.engine.loading.block_loader import load_block
from shoal.peer.engine.loading.block_tensors import count_block_bytes
from shoal.peer.engine.loading.loader import load_span
from shoal.peer.hosting import hosted_model
from shoal.peer.hosting.hosted_model import RESERVE_BYTES, BlockSizes, find_room, read_free_bytes
from shoal.peer.placement.supply import BlockRoom
from shoal.protocol.spans import Span

KV_BYTES = 10**6


@pytest.fixture
def spec(tiny_models: Any) -> Any:
    return read_spec(Checkpoint.open(tiny_models.get("llama").directory).config)


@pytest.mark.parametrize("variant", ["llama", "mixtral"])
@pytest.mark.parametrize("weights", ON_CPUS)
def test_counted_bytes_are_those_of_a_loaded_block(
    tiny_models: Any, variant: str, weights: WeightFormat
) -> None:
    checkpoint = Checkpoint.open(tiny_models.get(variant).directory)
    spec: Any = read_spec(checkpoint.config)

    block = load_block(checkpoint, spec, 0, Numerics(weights))

    # Norms and routers are not counted: next to nothing in a model of real size.
    assert 0.9 * block.num_bytes < count_block_bytes(spec, 0, weights) <= block.num_bytes


@pytest.mark.parametrize("weights", list(WeightFormat))
def test_blocks_fit_beside_sessions_and_a_block_that_loads(
    spec: Any, weights: WeightFormat
) -> None:
    sizes = BlockSizes.of_model(spec, weights)
    block_bytes = count_block_bytes(spec, 0, weights)
    assert sizes.num_bytes == (block_bytes,) * spec.num_blocks
    assert sizes.loading_bytes == count_block_bytes(spec, 0, WeightFormat.FP32)
    fixed_bytes = RESERVE_BYTES + KV_BYTES + sizes.loading_bytes

    def count(free_bytes: int) -> int:
        return int(find_room(sizes, KV_BYTES, free_bytes).find_stops(spec.num_blocks)[0])

    assert count(0) == count(fixed_bytes + block_bytes - 1) == 0
    assert count(fixed_bytes + 3 * block_bytes) == 3
    assert count(fixed_bytes + 100 * block_bytes) == spec.num_blocks


def test_block_without_experts_is_counted_as_what_it_is(tiny_models: Any) -> None:
    """Block 1 has an MLP; of five experts in the others a token meets three."""
    spec: Any = read_spec(Checkpoint.open(tiny_models.get("qwen3-moe").directory).config)

    sizes = BlockSizes.of_model(spec, WeightFormat.FP32)

    hidden, inner, expert = spec.hidden_size, spec.intermediate_size, 40
    around = 2 * hidden * (spec.query_size + spec.kv_size)
    router = 5 * hidden
    dense, mixed = around + 3 * hidden * inner, around + router + 5 * 3 * hidden * expert
    assert sizes.num_bytes == (4 * mixed, 4 * dense, 4 * mixed, 4 * mixed)
    active = around + router + 3 * 3 * hidden * expert
    mean = (3 * active + dense) / 4
    assert sizes.work == pytest.approx((active / mean, dense / mean, active / mean, active / mean))
    two = 4 * (mixed + dense)
    assert BlockRoom(two, sizes.num_bytes).find_stops(4).tolist() == [2, 3, 3, 4]


@pytest.mark.parametrize(
    ("variant", "table_bytes"), [("wrapped-gpt-neox", 0), ("wrapped-gpt-neo", 512 * 512)]
)
def test_blocks_that_only_transformers_knows_are_counted_by_their_shapes(
    tiny_models: Any, variant: str, table_bytes: int
) -> None:
    checkpoint = Checkpoint.open(tiny_models.get(variant).directory)
    spec = read_spec(checkpoint.config)

    sizes = BlockSizes.of_model(spec, WeightFormat.FP32)

    loaded = load_span(checkpoint, spec, Span(0, spec.num_blocks), Numerics(WeightFormat.FP32))
    assert list(sizes.num_bytes) == [block.num_bytes for block in loaded]
    weight_bytes = [num_bytes - table_bytes for num_bytes in sizes.num_bytes]
    assert sizes.loading_bytes == max(weight_bytes) + 4 * table_bytes
    assert sizes.work == (1.0,) * spec.num_blocks


def test_free_memory_is_less_than_there_is() -> None:
    with open("/proc/meminfo") as file:
        total_bytes = int(file.readline().split()[1]) * 1024
    assert 0 < read_free_bytes() < total_bytes


VERSION_2 = ("0::/a/b", "a/b", "memory.max", "memory.current", "")
VERSION_1 = (
    "4:memory:/a/b", "memory/a/b", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_",
)  # fmt: skip


def limit_group(group: Path, names: tuple[str, ...], limit: str, used_bytes: int) -> None:
    """Write the files of a control group, two thirds of whose memory are files that were read."""
    _, _, limit_name, used_name, prefix = names
    group.mkdir(parents=True, exist_ok=True)
    (group / limit_name).write_text(f"{limit}\n")
    (group / used_name).write_text(f"{3 * used_bytes}\n")
    (group / "memory.stat").write_text(
        f"anon 500\n{prefix}active_file {used_bytes}\n{prefix}inactive_file {used_bytes}\n"
    )


def use_groups(monkeypatch: pytest.MonkeyPatch, folder: Path, line: str) -> None:
    """Mount control groups at a folder, where this process is in the one that a line names."""
    own = folder / "own"
    own.write_text(f"9:name=systemd:/\n{line}\n")
    monkeypatch.setattr(hosted_model, "CGROUPS", folder)
    monkeypatch.setattr(hosted_model, "OWN_CGROUPS", own)


@pytest.mark.parametrize("names", [VERSION_2, VERSION_1])
@pytest.mark.parametrize(
    ("inner", "outer", "free_bytes"),
    [("8000000", "max", 7_500_000), ("9000000", "8000000", 7_000_000), ("100", "max", 0)],
)
def test_smallest_limit_of_the_groups_around_the_process_holds(
    names: tuple[str, ...],
    inner: str,
    outer: str,
    free_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, folder, *_ = names
    limit_group(tmp_path / folder, names, inner, 500_000)
    limit_group((tmp_path / folder).parent, names, outer, 1_000_000)
    use_groups(monkeypatch, tmp_path, line)

    assert read_free_bytes() == free_bytes


def test_memory_beyond_which_the_system_slows_a_service_down_is_not_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_group(tmp_path / "a", VERSION_2, "max", 500_000)
    (tmp_path / "a" / "memory.high").write_text("8000000\n")
    use_groups(monkeypatch, tmp_path, "0::/a/b")

    assert read_free_bytes() == 7_500_000


def test_container_sees_its_own_group_as_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_group(tmp_path, VERSION_2, "8000000", 500_000)
    use_groups(monkeypatch, tmp_path, "0::/as/the/host/names/it")

    assert read_free_bytes() == 7_500_000


def test_process_without_control_groups_has_what_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_model, "OWN_CGROUPS", tmp_path / "none")

    assert read_free_bytes() > 8_000_000
