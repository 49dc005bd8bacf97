"""A client that leaves while its long prompt is computed, over three nodes: all of them stop computing."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for

from bench.common.shapes import Shape, build

pytestmark = pytest.mark.slow

SLOW = Shape(n_layers=12, n_embd=512, n_heads=8, n_kv_heads=2, n_ff=2048, n_vocab=512, context_length=16384)
N_PROMPT, N_CHUNK = 8000, 128
"""Several seconds of prefill on a fast machine; a token is a byte."""
DEADLINE_S = 60


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, ...]]:
    folder = tmp_path_factory.mktemp("leaving")
    path = build(SLOW, folder / "slow.gguf")
    inference = {"n_threads": 1, "n_ctx": N_PROMPT + 100, "n_slots": 2, "prefill_chunk_tokens": N_CHUNK}
    with (
        running_daemon(folder, "a", load=[], inference=inference) as a,
        running_daemon(folder, "b", load=[], inference=inference, bootstrap=a.addresses) as b,
        running_daemon(folder, "c", load=[], inference=inference, bootstrap=a.addresses) as c,
    ):
        for node, layers in ((a, "0:4"), (b, "4:8"), (c, "8:12")):
            for url, body in (("", {"path": str(path)}), ("/slow/load", {"layers": layers})):
                answer = node.http.post(f"/api/admin/models{url}", json=body)
                assert '"error"' not in answer.text, answer.text
        for node in (a, b, c):
            wait_for(lambda node=node: is_complete(node), DEADLINE_S, "every node to know all holders")
        yield a, b, c


def is_complete(node: DaemonProcess) -> bool:
    return bool(node.http.get("/api/admin/models/slow/status").json()["complete"])


def ask(node: DaemonProcess, prompt: str, *, stream: bool) -> socket.socket:
    """A connection on which a completion has been asked for."""
    body = json.dumps({"model": "slow", "prompt": prompt, "max_tokens": 5, "stream": stream}).encode()
    host, port = node.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def is_idle(node: DaemonProcess) -> bool:
    stats = node.stats()
    busy = (
        stats["requests"]["active"],
        stats["pipelines"]["active_generations"],
        stats["pipelines"]["active_stage_requests"],
        sum(worker["n_pending"] for worker in stats["workers"]),
        *(slot["is_processing"] for slot in node.http.get("/slots").json()),
    )
    return not any(busy)


def ticks(nodes: tuple[DaemonProcess, ...]) -> list[int]:
    """Processor time of every worker."""
    stats = [Path(f"/proc/{pid}/stat").read_text() for node in nodes for pid in node.worker_pids()]
    return [sum(map(int, each.rpartition(")")[2].split()[11:13])) for each in stats]


def counts(nodes: tuple[DaemonProcess, ...]) -> dict[str, Any]:
    """Of the last node, the jobs that it walked; of all, the requests that clients left."""
    stats = [node.stats() for node in nodes]
    return {
        "jobs": stats[-1]["pipelines"]["segments_served"],
        "cancelled": sum(each["requests"]["cancelled"] for each in stats),
        "failed": sum(each["requests"]["failed"] for each in stats),
    }


@pytest.mark.parametrize(
    ("origin", "stream", "resets"),
    [(0, True, False), (0, False, True), (1, True, True)],
    ids=["streaming", "a whole answer, with a reset", "from a node in the middle"],
)
def test_every_node_stops_computing(
    nodes: tuple[DaemonProcess, ...], origin: int, stream: bool, resets: bool
) -> None:
    before = counts(nodes)
    prompt = f"{origin}{stream}" + "x" * (N_PROMPT - 10)
    with ask(nodes[origin], prompt, stream=stream) as connection:
        wait_for(
            lambda: nodes[2].stats()["pipelines"]["active_stage_requests"] == 1, DEADLINE_S, "the last stage"
        )
        start = ticks(nodes)
        wait_for(
            lambda: all(now > then + 2 for now, then in zip(ticks(nodes), start, strict=True)),
            DEADLINE_S,
            "every worker to compute",
        )
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for node in nodes:
        wait_for(lambda node=node: is_idle(node), DEADLINE_S, "the node to be idle after the client left")
    seen: list[list[int]] = []

    def is_quiet() -> bool:
        seen.append(ticks(nodes))
        return len(seen) > 10 and seen[-1] == seen[-10]

    wait_for(is_quiet, DEADLINE_S, "the workers to compute nothing more")
    after = counts(nodes)
    assert after["jobs"] - before["jobs"] < N_PROMPT // N_CHUNK // 2, "most of the prompt was computed"
    assert (after["cancelled"], after["failed"]) == (before["cancelled"] + 1, before["failed"])


def test_and_the_next_answer_comes(nodes: tuple[DaemonProcess, ...]) -> None:
    body = {"model": "slow", "prompt": "x" * 300, "max_tokens": 3, "ignore_eos": True}
    for node in nodes:
        answer = node.http.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 3
