"""Every task of the daemon fails once, and the daemon answers; or, where it cannot run without, says why it
ends."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import trio
from deadlines import DEADLINE_S
from running_daemon import config_of, daemon

import swarmllm.daemon
from swarmllm.daemon import DaemonInfo, run_daemon
from swarmllm.log_output import LineFormatter
from swarmllm.supervision import SCOPES, TASKS, EssentialTaskFailed, Supervision
from swarmllm.swarm import libp2p_router

pytestmark = pytest.mark.slow

ESSENTIAL = {task.name for task in TASKS if task.policy == "essential"}
AT_START = {"mDNS", "port mapping", "speed probe", "first loads", "repeated loads", "placement"}
"""Here they have nothing more to do soon after the start, or do not begin on loopback: they fail as they
begin."""


class Defect(Exception):
    pass


async def test_the_daemon_answers_after_the_failure_of_every_task_that_runs(tmp_path: Path) -> None:
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGQvqiXtv6Q98UKj5fAfYPXYLrj1vN8teFDeADmDg5sqR"
    tables = {"inference": {"share_prefix_cache_with_peers": "on"}}
    async with daemon(config_of(tmp_path, "solo", ["guide"], [nobody], **tables)) as node:
        await node.answers()
        running = [
            task.name
            for task in node.supervision.statuses()
            if task.state == "running" and task.name not in AT_START
        ]
        assert {*running} | AT_START | ESSENTIAL == {task.name for task in TASKS}
        for name in running:
            before = node.supervision.status(name)
            node.supervision.fail(name, Defect(f"in {name}"))
            await node.until(
                lambda name=name, n=before.n_restarts: node.supervision.status(name).n_restarts == n + 1
            )
            assert node.supervision.status(name).last_error == f"Defect: in {name}"
            await node.answers()
        failed = (await node.http.get("/api/admin/stats")).json()["tasks_failed"]
        assert {task["name"] for task in failed} == set(running)
        metrics = (await node.http.get("/metrics")).text
        for name in running:
            assert f'swarmllm_task_failures_total{{task="{name}"}} 1.0' in metrics


@pytest.mark.parametrize("name", sorted(AT_START))
async def test_the_daemon_answers_after_a_failure_at_the_start(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(supervision: Supervision) -> None:
        supervision.fail_next(name, Defect("at the start"))

    monkeypatch.setattr(libp2p_router, "is_loopback", lambda host: False)  # There mDNS is not even tried.
    tables = {"network": {"mdns": True}}
    async with daemon(config_of(tmp_path, "solo", ["guide"], **tables), prepare) as node:
        await node.until(lambda: node.supervision.status(name).n_failures == 1)
        if name == "first loads":
            assert node.supervision.status(name).state == "given up"
            (await node.http.post("/api/admin/models/guide/load", json={})).raise_for_status()
        await node.answers()


@pytest.mark.parametrize("name", sorted(ESSENTIAL))
async def test_the_daemon_ends_with_a_sentence_where_it_cannot_run_without_a_task(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervision = Supervision()
    monkeypatch.setattr(swarmllm.daemon, "Supervision", lambda: supervision)
    monkeypatch.setattr(swarmllm.daemon, "set_up_logging", lambda config: LineFormatter("text"))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    if name == "systemd watchdog":
        supervision.fail_next(name, Defect("by design"))

    def fail(where: DaemonInfo) -> None:
        supervision.fail(name, Defect("by design"))

    with pytest.raises(EssentialTaskFailed) as raised, trio.fail_after(DEADLINE_S):
        await run_daemon(config_of(tmp_path, "solo", []), on_serving=fail)
    assert f"'{name}'" in raised.value.message
    assert "Defect: by design" in raised.value.message


async def test_a_failure_in_a_scope_ends_its_owner_only(tmp_path: Path) -> None:
    """Of two nodes with half of the layers each, one fails in every scope."""
    error = Defect("by design")

    def prepare(supervision: Supervision) -> None:
        for scope in ("question", "peer", "connection", "worker"):
            supervision.fail_next(scope, error)

    def failed() -> set[str]:
        return {scope for scope, n in a.supervision.scope_failures().items() if n}

    async with daemon(config_of(tmp_path, "a", []), prepare) as a:
        # The first load fails with its worker's scope, the next one finds nothing wrong.
        url = "/api/admin/models/guide/load"
        first = await a.http.post(url, json={"layers": "0:6"})
        assert "internal error (Defect)" in first.text
        assert "error" not in (await a.http.post(url, json={"layers": "0:6"})).text
        async with daemon(config_of(tmp_path, "b", ["guide:6:12"], list(a.where.addresses))) as b:
            await a.answers()
            await b.answers()
            await a.until(lambda: {"question", "peer", "connection", "worker"} <= failed())
            a.supervision.fail_next("link", error)
            await a.answers()
            for what, streams in (("BufferedGeneration", True), ("_run_session", False)):
                a.supervision.fail_next("request", error, what)
                broken = await a.chat(stream=streams)
                assert broken.status_code == 500
                assert broken.json()["error"]["code"] == "internal_error"
                assert (await a.chat()).status_code == 200
            a.supervision.fail_next("download", error)
            source = "https://127.0.0.1:9/model.gguf"
            started = await a.http.post("/api/admin/downloads", json={"source": source})
            download: dict[str, Any] = started.json()
            shown = await a.http.get("/api/admin/downloads")
            (found,) = [d for d in shown.json()["downloads"] if d["id"] == download["id"]]
            assert found["state"] == "failed"
            assert "internal error (Defect)" in found["error"]
            assert (await a.chat()).status_code == 200
            # "model" needs a model that waits for its digests: see tests/downloads.
            assert {"request", "download"} <= failed() <= {scope.name for scope in SCOPES}
