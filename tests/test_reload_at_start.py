"""A signal that comes as soon as a node can be found."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from running_daemon import config_of

from swarmllm import daemon
from swarmllm.bootstrap_node import open_bootstrap_node
from swarmllm.daemon import DaemonInfo, OpenNode, open_daemon
from swarmllm.sd_notify import ServiceManager
from swarmllm.supervision import Supervision

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("open_node", [open_daemon, open_bootstrap_node])
async def test_whoever_finds_a_node_may_have_it_read_its_settings_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_node: OpenNode
) -> None:
    """SIGHUP ends a process that does not handle it."""
    found: list[Any] = []
    write = daemon._write_daemon_info

    def note(file: Path, daemon_info: DaemonInfo) -> None:
        found.append(signal.getsignal(signal.SIGHUP))
        write(file, daemon_info)

    monkeypatch.setattr(daemon, "_write_daemon_info", note)
    config = config_of(tmp_path, "node", load=[])
    with Supervision().active():
        async with open_node(config, lambda: config, ServiceManager({}), lambda node: None):
            assert (tmp_path / "node" / "daemon.json").is_file()
    assert len(found) == 1
    assert callable(found[0])
    assert not (tmp_path / "node" / "daemon.json").exists()
