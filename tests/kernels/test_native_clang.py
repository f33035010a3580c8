"""The kernels in C, compiled by Clang, where it is installed."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTENSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
    "ext-modules"
][0]
COMPILERS = [
    name for name in ("clang", *(f"clang-{n}" for n in range(14, 23))) if shutil.which(name)
]


@pytest.mark.slow
@pytest.mark.skipif(not COMPILERS, reason="no clang")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_clang_compiles_every_file(compiler: str, tmp_path: Path) -> None:
    flags = [*EXTENSION["extra-compile-args"], "-c"]

    process = subprocess.run(
        [compiler, *flags, *(ROOT / source for source in EXTENSION["sources"])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert process.returncode == 0, process.stderr
