"""SIGHUP: what may change counts at once, what may not waits for a restart, and nonsense changes nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, toml, wait_for
from deadlines import DEADLINE_S

from swarmllm.config import TABLES, Config, InferenceTable, NodeTable, StoreTable, keys_of
from swarmllm.reloading import merge


def test_only_what_is_marked_counts_at_once() -> None:
    old = Config(node=NodeTable(nickname="a"), store=StoreTable(share=True))
    new = Config(
        node=NodeTable(nickname="b", log_level="debug"),
        store=StoreTable(share=False),
        inference=InferenceTable(n_ctx=8192),
    )
    config, applied, waiting = merge(old, new)
    assert applied == ["node.log_level", "store.share"]
    assert waiting == ["node.nickname", "inference.n_ctx"]
    assert config.node == NodeTable(nickname="a", log_level="debug")
    assert config.inference == InferenceTable()
    assert merge(config, new) == (config, [], waiting)


def test_no_key_of_a_socket_or_a_key_to_it_is_reloaded() -> None:
    marked = {
        f"{table}.{key}"
        for table in TABLES
        for key, field in keys_of(table).items()
        if field.metadata["reload"]
    }
    assert marked
    of_sockets = [name for name in marked if name.startswith(("api.", "network.", "model."))]
    assert sorted(of_sockets) == ["network.bootstrap", "network.bootstrap_file"], "whom to dial is no socket"


@pytest.mark.slow
def test_a_daemon_reads_its_configuration_again(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "solo", load=[]) as node:
        hang_up(node, {"downloads": {"offline": True}, "store": {"share": False}, "api": {"port": 1}})
        wait_for(lambda: settings(node)["downloads"]["offline"], DEADLINE_S, "the change")
        assert settings(node)["store"]["share"] is False
        assert settings(node)["api"]["port"] == 0
        refused = node.http.post("/api/admin/downloads", json={"source": "https://example.org/x.gguf"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "offline")
        said = wait_for(
            lambda: "after a restart" in node.log.read_text(), DEADLINE_S, "the account in the log"
        )
        assert said
        assert "changed: store.share, downloads.offline; after a restart: api.port" in node.log.read_text()
        hang_up(node, {"downloads": {"ofline": True}})
        wait_for(
            lambda: "Did you mean 'offline'?" in node.log.read_text(), DEADLINE_S, "the refusal in the log"
        )
        assert settings(node)["downloads"]["offline"] is True
        assert node.stop() == 0


def hang_up(node: DaemonProcess, tables: dict[str, dict[str, Any]]) -> None:
    file = node.log.with_suffix(".toml")
    file.write_text(toml("solo", node.data_dir, [], [], tables))
    os.kill(node.process.pid, signal.SIGHUP)


def settings(node: DaemonProcess) -> dict[str, Any]:
    return dict(node.http.get("/api/admin/config").json()["config"])
