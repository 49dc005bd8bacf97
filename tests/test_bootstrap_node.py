"""`swarmllm bootstrap`: nodes that know it alone find each other, and it runs no models."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from daemon_process import DaemonProcess, clean_environment, daemon_info, running_daemon, toml, wait_for
from deadlines import DEADLINE_S
from libp2p.rcmgr import Direction, new_resource_manager

from swarmllm.bootstrap_node import CONNECTIONS_MAX, RELAY_LIMITS, bootstrap_settings
from swarmllm.config import Config, NetworkTable
from swarmllm.daemon_settings import swarm_settings
from swarmllm.swarm.discovery.bootstrap_file import read_bootstrap_file
from swarmllm.swarm.libp2p.guards import room_for_connections
from swarmllm.swarm.peers.connection_limits import CONNECTIONS_MAX as DAEMONS_CONNECTIONS_MAX


@dataclass
class BootstrapProcess:
    process: subprocess.Popen[bytes]
    config: Path
    printed: Path
    log: Path
    http: httpx.Client
    node_id: str

    def metric(self, name: str) -> float | None:
        found = re.search(rf"^{name} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else None


@contextmanager
def bootstrap_node(folder: Path, name: str = "first", **tables: dict[str, Any]) -> Iterator[BootstrapProcess]:
    """On loopback, on free ports; what it prints is a bootstrap file."""
    config, printed, log = (folder / f"{name}{end}" for end in (".toml", ".txt", ".log"))
    data_dir = folder / name
    config.write_text(toml(name, data_dir, [], [], tables))
    with printed.open("wb") as output, log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "swarmllm", "bootstrap", "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=clean_environment(),
        )
    try:
        found = wait_for(lambda: daemon_info(process, data_dir, log), DEADLINE_S, "daemon.json")
        wait_for(lambda: read_bootstrap_file(printed), DEADLINE_S, "its addresses")
        with httpx.Client(base_url=found["api_url"], trust_env=False, timeout=DEADLINE_S) as http:
            yield BootstrapProcess(process, config, printed, log, http, found["node_id"])
    finally:
        process.terminate()
        try:
            process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_it_is_a_relay_with_a_dht_and_many_connections_whatever_the_configuration_says(
    tmp_path: Path,
) -> None:
    config = Config(network=NetworkTable(dht="off", relay_service=False))
    settings = bootstrap_settings(config, tmp_path)
    assert (settings.dht, settings.relay_service, settings.relay_limits) == ("on", True, RELAY_LIMITS)
    assert settings.max_connections == CONNECTIONS_MAX > swarm_settings(config, tmp_path).max_connections
    assert swarm_settings(config, tmp_path).max_connections == DAEMONS_CONNECTIONS_MAX
    few = Config(network=NetworkTable(max_connections=7))
    assert {each(few, tmp_path).max_connections for each in (bootstrap_settings, swarm_settings)} == {7}


def test_libp2p_lets_it_have_so_many_connections_and_their_streams() -> None:
    """Its own default refuses the 1001st, and this is why it is not used."""
    stock, ours = new_resource_manager(), room_for_connections(CONNECTIONS_MAX)
    assert not all(stock.open_connection() for _ in range(CONNECTIONS_MAX))
    assert all(ours.open_connection() for _ in range(CONNECTIONS_MAX))
    assert all(ours.acquire_stream("peer", Direction.INBOUND) for _ in range(4 * CONNECTIONS_MAX))


@pytest.mark.slow
def test_nodes_that_know_it_alone_find_each_other(tmp_path: Path) -> None:
    with bootstrap_node(tmp_path) as first:
        known = {"bootstrap_file": str(first.printed)}
        with (
            running_daemon(tmp_path, "holder", load=["guide"], network=known) as holder,
            running_daemon(tmp_path, "asked", load=[], network=known, model={"on_demand": False}) as asked,
        ):
            wait_for(lambda: holder.node_id in peers(asked), DEADLINE_S, "each to know the other")
            assert first.node_id in peers(asked)
            wait_for(lambda: ask(asked).status_code == 200, DEADLINE_S, "an answer by the other's layers")
            assert first.metric("swarmllm_peers_connected") == 2
            assert first.metric("swarmllm_nodes_known") == 2
            assert (first.metric("swarmllm_relay_reservations"), first.metric("swarmllm_ready")) == (0, 1)
            assert first.metric("swarmllm_connections_max") == CONNECTIONS_MAX
            refuses_models(first)
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(DEADLINE_S) == 0


def refuses_models(node: BootstrapProcess) -> None:
    for path in ("/v1/chat/completions", "/v1/models", "/api/admin/models/guide/load", "/"):
        refused = node.http.post(path, json={"model": "guide", "messages": []})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "bootstrap_node"), path
        assert "has no models" in refused.json()["error"]["message"]
    assert "has no models" in node.http.post("/api/chat", json={"model": "guide"}).json()["error"]
    assert node.http.get("/health").json() == {"status": "ok"}
    assert node.http.get("/health/ready").json() == {"status": "ready", "reason": ""}
    assert node.http.get("/metrics", headers={"Host": "rebound.example"}).status_code == 403


@pytest.mark.slow
def test_more_addresses_are_taken_from_the_file_at_sighup_and_nonsense_changes_nothing(
    tmp_path: Path,
) -> None:
    nodes = tmp_path / "nodes.txt"
    nodes.write_text("# nobody yet\n")
    with bootstrap_node(tmp_path) as first:
        known = {"bootstrap_file": str(nodes)}
        with running_daemon(tmp_path, "late", load=[], network=known) as late:
            nodes.write_text(f"{first.printed.read_text()}nonsense\n")
            os.kill(late.process.pid, signal.SIGHUP)
            wait_for(lambda: "nothing is changed" in late.log.read_text(), DEADLINE_S, "the refusal")
            assert f"{nodes}, line 3" in late.log.read_text()
            assert peers(late) == set()
            nodes.write_text(first.printed.read_text())
            os.kill(late.process.pid, signal.SIGHUP)
            wait_for(lambda: first.node_id in peers(late), DEADLINE_S, "the connection")
            assert "SIGHUP: 1 more bootstrap addresses" in late.log.read_text()
            os.kill(first.process.pid, signal.SIGHUP)
            wait_for(lambda: "nothing is changed" in first.log.read_text(), DEADLINE_S, "its account")


def peers(node: DaemonProcess) -> set[str]:
    return {peer["node_id"] for peer in node.http.get("/api/admin/peers").json()["peers"]}


def ask(node: DaemonProcess) -> httpx.Response:
    messages = [{"role": "user", "content": "What is a pipeline?"}]
    body = {"model": "guide", "messages": messages, "max_tokens": 4}
    return node.http.post("/v1/chat/completions", json=body)
