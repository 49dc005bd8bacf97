"""ggml's functions for the processor, of a build for one kind of processor and of a portable one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from swarmllm_workers.build_info import build_info
from swarmllm_workers.kernels import cpu_variants, interposing


@pytest.mark.parametrize(
    ("library", "variant"),
    [
        ("libggml-cpu-haswell.so", "haswell"),
        ("libggml-cpu.so.0.25.3", ""),
        ("libggml-cpu.so", ""),
        ("libggml-cpu.dylib", ""),
    ],
)
def test_a_variant_is_named_by_its_library(library: str, variant: str) -> None:
    assert cpu_variants.variant_of(Path("/somewhere") / library) == variant


def test_exactly_one_library_computes_and_is_said() -> None:
    assert build_info()["features"]
    (library,) = interposing.mapped_paths("libggml-cpu")
    assert build_info()["cpu_variant"] == cpu_variants.variant_of(library)


REGISTRY: Final = """
#include <stdio.h>
static unsigned long n_devices;
unsigned long ggml_backend_dev_count(void) { return n_devices; }
void ggml_backend_load_all_from_path(const char *folder) {
    puts(folder);
    fflush(stdout);
    n_devices = 1;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_variants_are_looked_for_once_and_beside_libllama_only(tmp_path: Path) -> None:
    """A registry without a device, as that of a portable build is: it says where it is told to look."""
    (tmp_path / "registry.c").write_text(REGISTRY)
    library = tmp_path / "libggml.so"
    subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "registry.c", "-o", library], check=True)
    source = (
        "import ctypes; from swarmllm_workers.kernels import cpu_variants; "
        f"ctypes.CDLL({str(library)!r}); cpu_variants.load(); cpu_variants.load()"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [str(tmp_path)]
