"""The kernels in C as other compilers make them: with checks, by Clang, and for 64-bit ARM.

Programs for ARM are run by an emulator.

Results have the bits that this processor computes from the same sources. The emulator is slow, so
that most shapes are left out; `linear/test_int8.py` and its neighbours take all of them here.
"""

import os
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTENSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
    "ext-modules"
][0]
BUILD_FLAGS = EXTENSION["extra-compile-args"]
CHECKING_FLAGS = (
    "-std=c11 -O1 -ffp-contract=off -pthread -fsanitize=address,undefined -fno-sanitize-recover=all"
).split()
LIBRARIES = "/usr/aarch64-linux-gnu"
"""Where Debian's cross compiler keeps what its programs load."""

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Build:
    """The extension's files, compiled, and what else a driver needs to become a program."""

    command: Sequence[str]
    folder: Path
    compiled: Sequence[Path]

    def link(self, driver: str) -> str:
        program = str(self.folder / driver)
        source = ROOT / "tests" / "kernels" / f"{driver}.c"
        call(*self.command, "-o", program, source, *self.compiled, "-lm")
        return program


def find(*names: str) -> str:
    """Return the first program of some names, or skip."""
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.skip(f"no {names[0]}")


def call(*command: str | Path, cwd: Path | None = None) -> str:
    # The emulator is no place to look for memory that was not given back.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    process = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, env=environment
    )
    if "cannot find" in process.stderr:
        pytest.skip(f"{command[0]} lacks a library: {process.stderr}")
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def compile_extension(command: Sequence[str], folder: Path) -> Build:
    sources = [ROOT / source for source in EXTENSION["sources"]]
    call(*command, "-c", *sources, cwd=folder)
    return Build(command, folder, list(folder.glob("*.o")))


@pytest.fixture(scope="module")
def emulator() -> str:
    return find("qemu-aarch64", "qemu-aarch64-static")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Drivers for what is installed, which takes fifteen seconds to compile."""
    library = ROOT / "kernels" / "native" / f"cpu{EXTENSION_SUFFIXES[0]}"
    if not library.exists():
        pytest.skip("the kernels in C are not installed")
    return Build([find("cc"), *BUILD_FLAGS], tmp_path_factory.mktemp("here"), [library])


@pytest.fixture(scope="module")
def there(emulator: str, tmp_path_factory: pytest.TempPathFactory) -> Build:
    command = [find("aarch64-linux-gnu-gcc"), *BUILD_FLAGS, "-static"]
    return compile_extension(command, tmp_path_factory.mktemp("there"))


@pytest.mark.parametrize(
    ("driver", "share"),
    [
        ("int8_driver", "61"),
        ("prompt_attention_driver", "61"),
        ("gate_norm_driver", "1"),
        ("low_rank_driver", "1"),
    ],
)
def test_results_on_arm_have_the_bits_of_this_processor(
    driver: str, share: str, there: Build, emulator: str, here: Build
) -> None:
    computed_there = call(emulator, "-cpu", "max", there.link(driver), share)
    computed_here = call(here.link(driver), share)

    assert computed_there.splitlines()[-1] == computed_here.splitlines()[-1]


@pytest.mark.parametrize(
    ("processor", "instruction_sets"), [("max", "0 4 5"), ("cortex-a57", "0 4")]
)
def test_every_arm_processor_multiplies_with_what_it_has(
    processor: str, instruction_sets: str, there: Build, emulator: str
) -> None:
    printed = call(emulator, "-cpu", processor, there.link("int8_driver"), "29")

    assert printed.splitlines()[0].split() == instruction_sets.split()


@pytest.mark.parametrize(
    "processor",
    [
        "neoverse-v1",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("thunderx2t99", "cortex-a53")),
    ],
)
def test_files_of_arm_compile_where_the_installation_names_a_processor(
    processor: str, tmp_path: Path
) -> None:
    # That a file may use an instruction does not depend on optimization.
    command = [find("aarch64-linux-gnu-gcc"), *BUILD_FLAGS, "-O0", f"-mcpu={processor}", "-c"]

    call(*command, *(ROOT / "kernels/native").glob("int8_arm*.c"), cwd=tmp_path)


@pytest.mark.thorough
def test_code_for_arm_touches_no_byte_outside_its_arrays(emulator: str, tmp_path: Path) -> None:
    compiler = find("aarch64-linux-gnu-gcc")
    build = compile_extension([compiler, *CHECKING_FLAGS], tmp_path)

    call(emulator, "-L", LIBRARIES, "-cpu", "max", build.link("int8_driver"), "29")


@pytest.mark.thorough  # a minute
def test_code_for_this_processor_touches_no_byte_outside_its_arrays(tmp_path: Path) -> None:
    build = compile_extension([find("cc"), *CHECKING_FLAGS], tmp_path)

    for driver in ("int8_driver", "prompt_attention_driver", "gate_norm_driver", "low_rank_driver"):
        call(build.link(driver))


CLANGS = [name for name in ("clang", *(f"clang-{n}" for n in range(14, 23))) if shutil.which(name)]


@pytest.mark.skipif(not CLANGS, reason="no clang")
@pytest.mark.parametrize("compiler", CLANGS)
def test_clang_compiles_every_file(compiler: str, tmp_path: Path) -> None:
    compile_extension([compiler, *BUILD_FLAGS], tmp_path)
