"""The wheels of `make wheel`, on their way to a user: installed without a compiler, and asked.

The first run compiles libllama in all variants, which takes half an hour of one core; the result is kept."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from swarmllm import __version__, local_wheels

ROOT: Final = Path(__file__).resolve().parents[2]
KEPT: Final = ROOT / ".venv-compliance" / "suite" / "wheels"
NOT_OURS: Final = shutil.ignore_patterns(
    ".git", ".venv*", "node_modules", "*.so", "*.egg-info", "build", "dist", "tests"
)
BUILD_S: Final = 6000
LOADABLE: Final = {"base", "cpu-haswell", "cpu-skylakex", "cpu-x64", "cpu-zen4"}
Record = Callable[[str, object], None]


def ran(*command: str | Path, timeout_s: float = 300, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("wheels") / "tree"
    shutil.copytree(ROOT, tree, ignore=NOT_OURS)
    ran("make", "wheel", f"WORK={KEPT}", f"PYTHON={sys.executable}", cwd=tree, timeout_s=BUILD_S)
    return tree / "dist"


def test_all_that_the_index_has_as_sources_only_is_there_for_any_recent_linux(wheels: Path) -> None:
    names = sorted(path.name for path in wheels.glob("*.whl"))
    assert {name.partition("-")[0] for name in names} >= {"swarmllm", *local_wheels.COMPILED}
    assert not [name for name in names if not re.search(r"[-.](manylinux_2_\d+_\w+|none-any)\.whl$", name)]
    folder = [str(wheels)]
    assert local_wheels.spared(folder, {}) == set(local_wheels.COMPILED)


def test_the_runtime_has_each_library_once_and_all_variants(wheels: Path) -> None:
    (runtime,) = wheels.glob("llama_cpp_python-*.whl")
    with zipfile.ZipFile(runtime) as zipped:
        libraries = [Path(name) for name in zipped.namelist() if ".so" in name]
    own = [path for path in libraries if path.parent == Path("llama_cpp/lib")]
    assert {path.stem.removeprefix("libggml-") for path in own} >= LOADABLE
    assert all(path.suffix == ".so" for path in own)
    # The rest are libraries of the building system, bundled.
    assert {path.parts[0] for path in set(libraries) - set(own)} <= {"llama_cpp_python.libs"}


@pytest.fixture(scope="module")
def environment(
    wheels: Path, tmp_path_factory: pytest.TempPathFactory, record_testsuite_property: Record
) -> Path:
    """With nothing in it but wheels."""
    folder = tmp_path_factory.mktemp("installed")
    started_s = time.monotonic()
    ran(sys.executable, "-m", "venv", folder)
    (ours,) = wheels.glob("swarmllm-*.whl")
    options = ("--quiet", "--no-cache-dir", "--only-binary", ":all:", f"--find-links={wheels}")
    ran(folder / "bin" / "python", "-m", "pip", "install", *options, ours, timeout_s=900)
    record_testsuite_property("wheels_installed_s", round(time.monotonic() - started_s))
    return folder / "bin"


def test_nothing_is_missing_and_the_variant_is_said(environment: Path, tmp_path: Path) -> None:
    told = json.loads(ran(environment / "python", "-m", "swarmllm_workers.build_info", cwd=tmp_path))
    assert told["shortcomings"] == []
    assert told["cpu_variant"]
    assert f"SwarmLLM {__version__}".split()[1] in ran(environment / "swarmllm", "version", cwd=tmp_path)


def test_three_nodes_answer(environment: Path, tmp_path: Path) -> None:
    told = ran(environment / "swarmllm", "demo", cwd=tmp_path)
    assert "3 nodes" in told
    assert "nothing is left running" in told


def test_both_builds_are_of_one_class_where_they_give_equal_bits(environment: Path) -> None:
    """A class is a promise: logits of two builds with the same one are equal."""
    table = ran(sys.executable, "-m", "bench.build_bits", environment / "python", cwd=ROOT, timeout_s=900)
    head, _, ours, *others = [line.strip("| ").split(" | ") for line in table.splitlines()]
    told = [each for each in others if len(each) == len(head)]  # the rest do not run here
    assert (len(head) > 3, len(told) >= 2) == (True, True), table
    for each in told:
        if each[2] == ours[2]:
            assert set(each[3:]) == {"equal"}, table
