"""What surrounds the code: packaging, make targets, licence, versions."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import swarmllm

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
APACHE_2_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""Of https://www.apache.org/licenses/LICENSE-2.0.txt."""


def packages_on_disk() -> set[str]:
    return {
        ".".join((top, *path.parent.relative_to(ROOT / folder).parts))
        for top, folder in SETUPTOOLS["package-dir"].items()
        for path in (ROOT / folder).rglob("__init__.py")
    }


def test_the_distribution_has_every_package_and_no_other() -> None:
    assert set(SETUPTOOLS["packages"]) == packages_on_disk()


def test_data_files_that_the_distribution_promises_are_there() -> None:
    for package, patterns in SETUPTOOLS["package-data"].items():
        top, *rest = package.split(".")
        folder = ROOT.joinpath(SETUPTOOLS["package-dir"][top], *rest)
        for pattern in patterns:
            assert list(folder.glob(pattern)), f"{package} has no {pattern}"


def test_the_version_is_the_same_everywhere() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None
    assert {PYPROJECT["project"]["version"], swarmllm.__version__, newest[1]} == {swarmllm.__version__}


def test_the_licence_is_apache_2() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_SHA256
    assert PYPROJECT["project"]["license"] == "Apache-2.0"


def test_continuous_integration_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text("utf-8").splitlines()[-1] == "exec make test"
    assert re.search(r"^make test\b", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)


def make(*arguments: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def test_make_help_explains_every_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"^  make ([\w-]+)", make(), re.MULTILINE)) == targets


@pytest.mark.parametrize(
    "step", ["bootstrap.py --extra test", "ruff check", "ruff format --check", "mypy", "pytest"]
)
def test_make_test_does_every_check(step: str) -> None:
    assert step in make("--dry-run", "test")
