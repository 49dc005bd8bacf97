"""What `make dist` builds, as twine, auditwheel and the list of classifiers of an index read it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from swarmllm import __version__

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = ROOT / ".venv-compliance" / "bin"
URL = "https://git.example/swarmllm"
NOT_OURS = shutil.ignore_patterns(".git", ".venv*", "node_modules", "*.so", "*.egg-info", "dist", "tests")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The target fails where twine or auditwheel does."""
    tree = tmp_path_factory.mktemp("distribution") / "tree"
    shutil.copytree(ROOT, tree, ignore=NOT_OURS)
    done = subprocess.run(
        ["make", "dist", f"URL={URL}", f"PYTHON={sys.executable}"],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert done.stdout.count("PASSED") == 2
    return sorted((tree / "dist").iterdir())


def test_an_index_takes_the_files(files: list[Path]) -> None:
    wheel, source = (path.name for path in files)
    assert source == f"swarmllm-{__version__}.tar.gz"
    assert wheel.startswith(f"swarmllm-{__version__}-py3-none-manylinux_2_")


def test_the_wheel_has_the_kernels(files: list[Path]) -> None:
    (wheel,) = (path for path in files if path.suffix == ".whl")
    with zipfile.ZipFile(wheel) as zipped:
        libraries = {Path(name).name.partition(".")[0] for name in zipped.namelist() if name.endswith(".so")}
    package = ROOT / "workers" / "swarmllm_workers"
    installed = {path.name.partition(".")[0] for path in package.glob("_*.so")}
    assert {"_lone_row", "_small_batches", "_tap"} <= libraries == installed


def test_the_index_knows_the_classifiers(files: list[Path]) -> None:
    (source,) = (path for path in files if path.suffix == ".gz")
    with tarfile.open(source) as archive:
        said = archive.extractfile(f"swarmllm-{__version__}/PKG-INFO")
        assert said is not None
        classifiers = HeaderParser().parsestr(said.read().decode()).get_all("Classifier", [])
    code = "import sys, trove_classifiers as t; print(sorted(set(sys.argv[1:]) - t.classifiers))"
    done = subprocess.run(
        [FOREIGN / "python", "-c", code, *classifiers], capture_output=True, text=True, timeout=60, check=True
    )
    assert (bool(classifiers), done.stdout) == (True, "[]\n")
