"""The files for containers as their own tools read them: hadolint, and the schema of compose files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TOOLS = ROOT / ".venv-compliance" / "bin"
DOCKER = ROOT / "docs" / "docker"


@pytest.mark.parametrize(
    "command",
    [
        ["hadolint", "--failure-threshold", "style", str(DOCKER / "Dockerfile")],
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(DOCKER / "compose.yaml")],
    ],
    ids=["Dockerfile", "compose.yaml"],
)
def test_nothing_to_complain_of(command: list[str]) -> None:
    tool, *arguments = command
    done = subprocess.run([str(TOOLS / tool), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
