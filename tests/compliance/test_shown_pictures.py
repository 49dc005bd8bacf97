"""Clients that other people wrote show pictures to a model that two daemons run, with one's projector."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from seeing_daemons import seeing_daemons
from test_http_clients import FOREIGN, judge
from vision_models import file_of, pixels


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
    with seeing_daemons(folder) as a:
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
