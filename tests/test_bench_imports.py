"""Benchmarks of the worker run its kernels, which stand before libllama if they are loaded first."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKERS, LIBLLAMA = "swarmllm_workers", "llama_cpp"


def imported(path: Path) -> list[str]:
    """The packages that it imports, in that order, but for those inside functions."""
    found: list[str] = []
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            found += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module.partition(".")[0])
    return found


BENCHES = [
    path for path in sorted((ROOT / "bench").rglob("*.py")) if {WORKERS, LIBLLAMA} <= set(imported(path))
]


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_the_workers_package_is_imported_before_libllama(path: Path) -> None:
    packages = imported(path)
    assert packages.index(WORKERS) < packages.index(LIBLLAMA)


def test_there_are_such_benches() -> None:
    assert {"step", "products"} <= {path.stem for path in BENCHES}
