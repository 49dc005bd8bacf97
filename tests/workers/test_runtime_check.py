"""A worker finds out what it does without, in processes of its own: libllama is loaded once in each."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import swarmllm_workers
from swarmllm_workers.engine import releases, runtime_check
from swarmllm_workers.kernels.interposing import find_library

NOT_BUILT = [name for name in runtime_check.COMPILED if find_library(name) is None]
pytestmark = pytest.mark.skipif(bool(NOT_BUILT), reason=f"not built here: {', '.join(NOT_BUILT)}")

SAY = (
    "import dataclasses, json; from swarmllm_workers.engine import runtime_check; "
    "from swarmllm_workers.kernels import row_attention; "
    "told = runtime_check.shortcomings(); "
    "print(json.dumps([told, dataclasses.asdict(runtime_check.calls()), runtime_check.reads_structs(), "
    "row_attention.chosen('auto', 'f16')]))"
)


def told_by(
    before: Iterable[str] = (), packages: Path | None = None
) -> tuple[list[str], dict[str, bool], bool, str]:
    """What a process says whose first lines are `before`."""
    path = [f"import sys; sys.path.insert(0, {str(packages)!r})"] if packages else []
    source = "; ".join([*path, *before, SAY])
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, timeout=120, check=True)
    told, calls, reads, attention = json.loads(done.stdout)
    return told, calls, reads, attention


def test_the_releases_that_tests_are_run_with_are_those_that_count_as_tried() -> None:
    root = Path(__file__).parents[2]
    pin = re.search(r'"llama-cpp-python==([\d.]+)"', (root / "pyproject.toml").read_text())
    others = re.search(r"^RELEASES \?= ([\d. ]+)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert pin is not None
    assert others is not None
    assert (pin[1], *others[1].split()) == releases.TRIED


def test_nothing_is_missing_here() -> None:
    told, calls, reads_structs, attention = told_by()
    assert told == []
    assert calls == {"products": True, "attention": True}
    assert reads_structs
    assert attention == "auto"


def test_functions_that_libllama_never_calls_are_not_relied_on() -> None:
    """As with a libllama that was linked statically: its symbols are bound before ours are there."""
    told, calls, _, attention = told_by(["import llama_cpp"])
    assert calls == {"products": False, "attention": False}
    named = [each.split(": ")[0] for each in told]
    assert named[:2] == [
        f"this build of libllama never calls {name}" for name in ("small_batches", "row_attention")
    ]
    # On a processor with AMX, a libllama that was compiled for it cannot be kept from it either.
    assert set(named[2:]) <= {"ggml cannot be kept from AMX"}
    assert attention == "off"


def test_compiled_parts_that_are_missing_are_named(tmp_path: Path) -> None:
    package = tmp_path / "swarmllm_workers"
    ours = Path(swarmllm_workers.__file__).parent
    shutil.copytree(ours, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    told, calls, _, attention = told_by(packages=tmp_path)
    missing = [each for each in told if "cannot be kept from AMX" not in each]
    assert [each.split(" is missing")[0].rpartition(" ")[2] for each in missing] == list(
        runtime_check.COMPILED
    )
    assert calls == {"products": False, "attention": False}
    assert attention == "off"


def test_other_layouts_and_releases_are_told() -> None:
    told, _, reads_structs, _ = told_by(
        [
            "from swarmllm_workers.engine import tap",
            "import ctypes",
            "fields = dict(tap.TensorHead._fields_)",
            "tap.TensorHead = type('TensorHead', (ctypes.Structure,), "
            "{'_fields_': [('type', ctypes.c_int), ('new', ctypes.c_void_p), *list(fields.items())[1:]]})",
            "import llama_cpp",
            "llama_cpp.__version__ = '9.9.9'",
        ]
    )
    assert not reads_structs
    assert [" laid out " in each or "9.9.9" in each for each in told] == [True, True]
