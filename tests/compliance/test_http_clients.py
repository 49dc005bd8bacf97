"""Clients that other people wrote against a real daemon, and schemathesis over /openapi.json.

The Python ones live in an environment of their own (`make compliance` makes it): what they need would weigh
down, and disagree with, that of the tests.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "http"
FOREIGN = Path(os.environ.get("SWARMLLM_COMPLIANCE_VENV", ROOT / ".venv-compliance")) / "bin"
N_EXAMPLES, SEED = "5", "1"
"""A minute or two, the same every time."""
NOT_FUZZED = "/api/(events|admin/(models|downloads|config|stats|peers))"
"""An endless stream; and what would hash, load or delete files for as long as it is asked to."""
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("compliance")
    inference = {"n_threads": 2, "n_ctx": 4096, "max_queued_requests": 64}
    with running_daemon(folder, "judged", load=["guide"], inference=inference) as node:
        wait_for(
            lambda: node.http.get("/health/ready").status_code == 200, DEADLINE_S, "the guide to be loaded"
        )
        yield node
        assert node.process.poll() is None, "the daemon has died"
        assert "Traceback" not in node.log.read_text()


def judge(*command: str | Path, node: DaemonProcess) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"SWARMLLM_URL": node.url, "SWARMLLM_MODEL": "guide"}
    done = subprocess.run(
        command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


def test_python_clients(node: DaemonProcess) -> None:
    judge(
        FOREIGN / "python",
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-c",
        os.devnull,
        "python_clients.py",
        node=node,
    )


def test_node_client(node: DaemonProcess) -> None:
    judge("node", "node_client.mjs", f"{node.url}/v1", "guide", node=node)


def test_schemathesis(node: DaemonProcess) -> None:
    """Whatever is sent, no answer is a fault of the server, or of another type or shape than documented."""
    judge(
        *(FOREIGN / "schemathesis", "run", f"{node.url}/openapi.json", "--url", node.url),
        *("--checks", CHECKS, "--seed", SEED, "--max-examples", N_EXAMPLES, "--workers", "2"),
        *("--phases", "examples,coverage,fuzzing", "--mode", "all", "--request-timeout", "60"),
        *("--exclude-path-regex", NOT_FUZZED),
        node=node,
    )
