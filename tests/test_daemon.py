"""The daemon as a process: it starts, says where it is, ends cleanly and leaves nothing behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from daemon_process import clean_environment, process_exists, running_daemon, toml, wait_for
from deadlines import DEADLINE_S

from swarmllm.daemon import OPEN_FILES

pytestmark = pytest.mark.slow


def failing_daemon(folder: Path, load: list[str], **tables: Any) -> subprocess.CompletedProcess[str]:
    config = folder / "failing.toml"
    config.write_text(toml("failing", folder / "data", load, [], tables))
    command = [sys.executable, "-m", "swarmllm", "daemon", "--config", str(config)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=clean_environment()
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with running_daemon(tmp_path, "solo", load=["guide:0:4"]) as node:
        file = node.data_dir / "daemon.json"
        found = json.loads(file.read_text())
        assert found["api_url"] == node.url
        assert found["pid"] == node.process.pid
        assert found["node_id"] == node.stats()["node_id"]
        assert "\nswarmllm_dht_nodes 0" in node.http.get("/metrics").text
        (worker,) = wait_for(node.worker_pids, DEADLINE_S, "a worker")
        node.process.send_signal(number)
        assert node.process.wait(DEADLINE_S) == 0
        assert not process_exists(worker)
        assert not file.exists()
        assert "Traceback" not in node.log.read_text()


def test_its_data_folder_is_private_and_its_identity_lasts(tmp_path: Path) -> None:
    ids = []
    for _ in range(2):
        with running_daemon(tmp_path, "solo", load=[]) as node:
            assert stat.S_IMODE(node.data_dir.stat().st_mode) == 0o700
            ids.append(node.node_id)
            node.stop()
    assert ids[0] == ids[1]


def test_it_asks_for_all_the_open_files_that_it_may_have(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        with running_daemon(tmp_path, "solo", load=[]) as node:
            its_soft, its_hard = resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert its_hard == hard
    assert its_soft == (OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)) > 1024


def test_a_stream_under_way_does_not_hold_up_the_end(tmp_path: Path) -> None:
    body = {
        "model": "guide",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "ignore_eos": True,
    }
    with running_daemon(tmp_path, "solo", load=["guide"]) as node:
        wait_for(
            lambda: node.http.get("/health/ready").status_code == 200, DEADLINE_S, "the guide to be loaded"
        )
        with node.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            next(answer.iter_lines())
            node.process.terminate()
            assert node.process.wait(DEADLINE_S) == 0
        assert "Traceback" not in node.log.read_text()


def test_a_killed_daemon_leaves_no_workers(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "solo", load=["guide:0:4"]) as node:
        (worker,) = wait_for(node.worker_pids, DEADLINE_S, "a worker")
        os.kill(node.process.pid, signal.SIGKILL)
        wait_for(
            lambda: not process_exists(worker), DEADLINE_S, "the worker to notice that the daemon is gone"
        )


def test_a_second_daemon_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "data", load=[]) as node:
        second = failing_daemon(tmp_path, [])
        assert second.returncode != 0
        assert str(node.data_dir) in second.stderr
        assert "Traceback" not in second.stderr
        assert json.loads((node.data_dir / "daemon.json").read_text())["pid"] == node.process.pid


@pytest.mark.parametrize(
    ("load", "words"),
    [(["gide"], ["gide", "guide"]), (["guide:0:99"], ["0:99", "0:12"]), (["guide:x"], ["'x'"])],
)
def test_a_mistake_in_what_to_load_ends_it_with_the_reason(
    tmp_path: Path, load: list[str], words: list[str]
) -> None:
    failed = failing_daemon(tmp_path, load)
    assert failed.returncode != 0
    assert all(word in failed.stderr for word in words)
    assert "Traceback" not in failed.stderr


def test_a_port_that_is_taken_ends_it_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        failed = failing_daemon(tmp_path, [], api={"port": other.getsockname()[1]})
    assert failed.returncode != 0
    assert "api.port" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "data" / "daemon.json").exists()
