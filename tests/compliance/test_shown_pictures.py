"""Clients that other people wrote show pictures to a model that two daemons run, with one's projector."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import PATIENCE_S
from test_http_clients import FOREIGN, judge
from vision_models import file_of, pixels, projector

from swarmllm.guide import GUIDE_PATH

INFERENCE = {"n_threads": 1, "n_slots": 2, "n_ctx": 1024}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shown")
    kinds = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP", "gif": "GIF"}
    for seed, (suffix, kind) in enumerate(kinds.items(), start=1):
        (folder / f"{seed}.{suffix}").write_bytes(file_of(pixels(60, 40, seed), kind))
    return folder


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("cut")
    mmproj = projector(folder / "mmproj.gguf", "janus_pro", 256)
    with (
        running_daemon(folder, "a", load=["guide:0:6"], inference=INFERENCE) as a,
        running_daemon(folder, "b", load=["guide:6:12"], inference=INFERENCE, bootstrap=a.addresses),
    ):
        body = {"path": str(GUIDE_PATH), "name": "guide", "mmproj": str(mmproj)}
        lines = a.http.post("/api/admin/models", json=body).text.splitlines()
        assert json.loads(lines[-1])["model"]["projector"]["path"] == str(mmproj)
        ready = "/health/ready?model=guide"
        wait_for(lambda: a.http.get(ready).status_code == 200, PATIENCE_S, "both halves of the guide")
        yield a
        assert a.process.poll() is None, "the daemon has died"
        assert "Traceback" not in a.log.read_text()


def test_python_clients_show_pictures_to_a_cut_model(
    node: DaemonProcess, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARMLLM_PICTURES", str(pictures))
    judge(
        *(FOREIGN / "python", "-m", "pytest", "-q", "--noconftest", "-c", os.devnull),
        "python_picture_clients.py",
        node=node,
    )


def test_node_clients_show_pictures_to_a_cut_model(node: DaemonProcess, pictures: Path) -> None:
    judge("node", "node_picture_clients.mjs", node.url, "guide", str(pictures / "1.png"), node=node)
