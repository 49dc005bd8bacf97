"""Products with NEON have, to the bit, what ggml's dot product of each column has on ARM.

`make test-neon` fetches ggml's source. It is compiled for ARM here, with our C files and a program that
compares both (`native/neon_products.c`), and run by an emulator, or as it is where this is an ARM. An
emulator computes what a processor computes; how long that takes says nothing.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from swarmllm_workers.kernels.kernel_choice import IS_ARM, MatrixType

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).resolve().parents[2]
NATIVE: Final = ROOT / "workers/swarmllm_workers/native"
PROGRAM: Final = Path(__file__).parent / "native/neon_products.c"
DOTS: Final = "src/ggml-cpu/arch/arm/quants.c"
"""ggml's dot products."""
OURS: Final = next(
    ast.literal_eval(each)
    for each in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
    if isinstance(each, ast.Tuple) and ast.unparse(each).startswith("('small_batches',")
)
"""The C files of the library that has the kernels."""
COMPILER: Final = "gcc" if IS_ARM else "aarch64-linux-gnu-gcc"
EMULATOR: Final = "qemu-aarch64"
PACKAGES: Final = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
TIMEOUT_S: Final = 300
SVE: Final = {MatrixType.Q8_0, MatrixType.Q4_0}
"""Of which a ggml for SVE has other bits than any of our kernels."""


@dataclass(frozen=True)
class Build:
    """Of ggml, and the processor that runs it."""

    march: str
    cpu: str
    has_dot: bool = False
    has_sve: bool = False
    options: tuple[str, ...] = ()
    runs_dots: bool = True
    """The processor has dot products of bytes."""


BUILDS: Final = (
    Build("armv8-a", "cortex-a72", runs_dots=False),
    Build("armv8-a", "neoverse-n1"),
    Build("armv8.2-a+dotprod", "neoverse-n1", has_dot=True),
    # GCC 12 vectorises sums of an odd block of Q5_0 for i8mm, and they come out wrong under QEMU 7.2.
    Build("armv8.2-a+dotprod+i8mm", "max", has_dot=True, options=("-fno-tree-vectorize",)),
    Build("armv8.2-a+dotprod+sve", "max,sve128=on", has_dot=True, has_sve=True),
)


def ggml() -> Path:
    suite = Path(os.environ.get("LLAMACPP_SUITE", ROOT / ".venv-compliance/suite"))
    pattern = "llama_cpp_python-*/vendor/llama.cpp/ggml"
    found = [each for each in sorted(suite.glob(pattern)) if (each / DOTS).is_file()]
    if not found:
        pytest.skip("ggml's source is not here: make test-neon fetches it")
    if shutil.which(COMPILER) is None or (not IS_ARM and shutil.which(EMULATOR) is None):
        pytest.skip(f"no compiler and emulator for ARM are installed: apt-get install {PACKAGES}")
    return found[-1]


def compiled(source: Path, into: Path, *options: str) -> Path:
    command = [COMPILER, "-c", *options, str(source), "-o", str(into)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert built.returncode == 0, built.stderr[-2000:]
    return into


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Compiled as `setup.py` has it, for every processor."""
    ggml()
    folder = tmp_path_factory.mktemp("neon")
    found = [compiled(NATIVE / f"{name}.c", folder / f"{name}.o", "-O2", "-fPIC") for name in OURS]
    return [*found, compiled(PROGRAM, folder / "program.o", "-O2", f"-I{NATIVE}")]


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: f"{build.march} on {build.cpu}")
def test_products_have_the_bits_of_ggmls_dot_products(build: Build, ours: list[Path], tmp_path: Path) -> None:
    if IS_ARM and build != BUILDS[0]:
        pytest.skip("what this processor is not is tried by an emulator, on another one")
    source = ggml()
    includes = [f"-I{source / folder}" for folder in ("include", "src", "src/ggml-cpu")]
    options = ["-O3", "-DNDEBUG", "-w", "-std=gnu11", f"-march={build.march}", *build.options, *includes]
    theirs = compiled(source / DOTS, tmp_path / "quants.o", *options)
    program = tmp_path / "program"
    linked = subprocess.run(
        [COMPILER, "-static", *map(str, ours), str(theirs), "-lm", "-o", str(program)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert linked.returncode == 0, linked.stderr[-2000:]
    run = [] if IS_ARM else [EMULATOR, "-cpu", build.cpu]
    told = subprocess.run(
        [*run, str(program), str(int(build.has_dot)), str(int(build.has_sve))],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert told.returncode == 0, told.stdout[-2000:] + told.stderr[-2000:]
    first, *lines = [line.split() for line in told.stdout.splitlines()]
    assert IS_ARM or first[-1] == str(int(build.runs_dots))
    for kind in MatrixType:
        answers = {line[0] for line in lines if line[1] == kind.name}
        assert answers == {"left" if build.has_sve and kind in SVE else "equal"}, kind
