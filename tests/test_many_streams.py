"""Sixty-four streams at a time whose clients leave as they please: afterwards the daemon is as it was.
Many short requests where there is no processor time left: nodes go on trusting each other."""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S

from bench import starved

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_demo_nodes")]

N_STREAMS = 64
WAYS_TO_LEAVE = ("at once", "before the answer", "in the middle", "with a reset", "never")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("many-streams")
    inference = {"n_threads": 1, "n_ctx": 4096, "n_slots": 8, "max_queued_requests": N_STREAMS}
    with running_daemon(folder, "solo", load=["guide"], inference=inference) as node:
        wait_for(
            lambda: node.http.get("/health/ready").status_code == 200, DEADLINE_S, "the guide to be loaded"
        )
        yield node


def request(node: DaemonProcess, seed: int) -> bytes:
    body = {
        "model": "guide",
        "messages": [{"role": "user", "content": f"What is a pipeline? ({seed})"}],
        "max_tokens": 60,
        "seed": seed,
        "stream": True,
        "ignore_eos": True,
    }
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {node.url.removeprefix('http://')}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data


async def visit(node: DaemonProcess, seed: int, ends: list[bytes]) -> None:
    rng = random.Random(seed)
    way = WAYS_TO_LEAVE[seed % len(WAYS_TO_LEAVE)]
    host, port = node.url.removeprefix("http://").split(":")
    async with await trio.open_tcp_stream(host, int(port)) as connection:
        await connection.send_all(request(node, seed))
        if way == "at once":
            return
        if way == "before the answer":
            await trio.sleep(rng.random() * 0.05)
            return
        seen = b""
        limit = rng.randrange(300, 3000) if way != "never" else 2**30
        while len(seen) < limit and (chunk := await connection.receive_some(512)):
            seen += chunk
        if way == "with a reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif way == "never":
            ends.append(seen[-40:])


async def wave(node: DaemonProcess, first_seed: int) -> list[bytes]:
    ends: list[bytes] = []
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            for i in range(N_STREAMS):
                nursery.start_soon(visit, node, first_seed + i, ends)
    return ends


def left_behind(node: DaemonProcess) -> dict[str, Any]:
    """What a request could leave in the daemon and its worker, once nothing runs any more."""

    def idle() -> dict[str, Any] | None:
        stats = node.stats()
        busy = (
            stats["requests"]["active"],
            stats["requests"]["queued"],
            stats["pipelines"]["active_generations"],
            sum(worker["n_pending"] for worker in stats["workers"]),
        )
        return None if any(busy) else stats

    stats = wait_for(idle, DEADLINE_S, "the daemon to be idle")
    assert not any(slot["is_processing"] for slot in node.http.get("/slots").json())
    pids = [node.process.pid, *node.worker_pids()]
    return {
        "tasks": stats["tasks"],
        "threads of the worker": len(list(Path(f"/proc/{pids[1]}/task").iterdir())),
        "file descriptors": [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids],
    }


async def test_clients_that_leave_at_random_leave_nothing_behind(node: DaemonProcess) -> None:
    await wave(node, 1000)
    before = wait_for_quiet(node)
    completed = node.stats()["requests"]["completed"]
    for first_seed in (2000, 3000):
        ends = await wave(node, first_seed)
        assert len(ends) == len([seed for seed in range(N_STREAMS) if (first_seed + seed) % 5 == 4])
        assert all(b"[DONE]" in end for end in ends)
    assert wait_for_quiet(node) == before
    stats = node.stats()["requests"]
    assert stats["failed"] == 0
    assert stats["cancelled"] > 0
    assert stats["completed"] >= completed + len(ends)
    # As many as there are slots, at the same time: one that was kept would be missed.
    answers = await wave(node, 4004)
    assert answers


def test_honest_nodes_without_processor_time_keep_their_trust() -> None:
    """`python -m bench.starved` does the same with 2,000 requests."""
    outcome = starved.run(120, 6, 4)
    assert outcome.statuses[200] > 0
    assert all(len(texts) == 1 for texts in outcome.texts.values())
    assert outcome.lowest == outcome.first
    assert outcome.keeps_trust


def wait_for_quiet(node: DaemonProcess) -> dict[str, Any]:
    """Twice the same: connections that were just closed are gone."""
    seen: list[dict[str, Any]] = []

    def same() -> dict[str, Any] | None:
        seen.append(left_behind(node))
        return seen[-1] if len(seen) > 5 and all(each == seen[-1] for each in seen[-5:]) else None

    return dict(wait_for(same, DEADLINE_S, "the daemon to be quiet"))
