"""The files for containers as their own tools read them: hadolint, and the schema of compose files."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from daemon_process import wait_for
from deadlines import DEADLINE_S

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


def docker_answers() -> bool:
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(["docker", "info"], capture_output=True, timeout=20).returncode == 0
    return False


@pytest.mark.skipif(not docker_answers(), reason="no docker daemon answers")
def test_the_image_is_built_and_its_nodes_answer_together() -> None:
    compose = ["docker", "compose", "-f", str(DOCKER / "compose.yaml"), "-p", "swarmllm-compliance"]

    def run(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*compose, *arguments], capture_output=True, text=True, timeout=timeout_s)

    def answer() -> str:
        """Empty until the nodes have found each other."""
        asked = ("exec", "-T", "kitchen", "swarmllm", "chat", "What is a pipeline?", "--route")
        return run(*asked, timeout_s=300).stdout

    try:
        up = run("up", "--build", "--wait", "--wait-timeout", "300", timeout_s=3600)
        assert up.returncode == 0, (up.stdout + up.stderr)[-8000:]
        nodes = ("kitchen", "study", "attic")
        wait_for(lambda: all(node in answer() for node in nodes), DEADLINE_S, "an answer over all three")
    finally:
        subprocess.run([*compose, "down", "--volumes"], capture_output=True, timeout=300)
