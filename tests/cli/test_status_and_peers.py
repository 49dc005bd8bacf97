"""status and peers: what is shown, what a program gets."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from fake_node import FakeNode

Run = Callable[..., Result]


STATS: dict[str, Any] = {
    "node_id": "12D3KooWSelf",
    "nickname": "kitchen",
    "version": "0.1.0",
    "pid": 4711,
    "uptime_s": 3725.0,
    "ready": True,
    "addresses": ["/ip4/192.0.2.7/tcp/8810/p2p/12D3KooWSelf"],
    "peers_connected": 2,
    "requests": {"active": 1, "queued": 3, "max": 10, "completed": 5, "failed": 6, "cancelled": 7},
    "generated_tokens": 890,
    "models": [{"name": "guide", "model_id": "ab" * 32, "layers": ["0:4", "8:12"]}],
}


PEER: dict[str, Any] = {
    "node_id": "12D3KooWPeer",
    "nickname": "attic",
    "software": "swarmllm/0.1.0",
    "addresses": ["/ip4/192.0.2.8/tcp/8810"],
    "rtt_ms": 1.25,
    "data_plane": "direct",
    "bytes_sent": 2048,
    "bytes_received": 10,
    "connected_s": 12.0,
    "bytes_per_s": 250_000_000,
    "damaged_jobs": 2,
    "announced_prefixes": 3,
    "trust": 0.5,
    "models": [
        {
            "name": "guide",
            "model_id": "ab" * 32,
            "layers": ["4:12"],
            "kernel_class": "0.3.36-avx2-f16-1f0e9d2c",
        }
    ],
    "n_models": 4,
}


DETAILS: dict[str, Any] = {
    "node_id": "12D3KooWPeer",
    "nickname": "attic",
    "connected": PEER,
    "trust": {
        "score": 0.225,
        "work_min": 0.25,
        "may_work": False,
        "listed": "",
        "counts": {"wrong bytes": 1, "checked": 4, "disputed": 2},
        "recent": [
            {"at": 0.0, "event": "wrong bytes", "meaning": "it lied", "detail": "blk.0", "score": 0.225}
        ],
    },
}


def test_status_shows_the_node_at_a_glance(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/stats", STATS)
    shown = run("status").output
    for expected in (
        "kitchen", "12D3KooWSelf", "ready, up 1:02:05, process 4711", f"{node.url}/v1",
        "/ip4/192.0.2.7/tcp/8810",
        "2 connected", "guide  layers 0:4, 8:12",
        "1 of 10 running, 3 waiting", "5 completed, 6 failed, 7 cancelled",
        "890 tokens",
    ):  # fmt: skip
        assert expected in shown


def test_status_shows_the_kernel_class_of_what_is_loaded_once(run: Run, node: FakeNode) -> None:
    worker = {"model_id": "ab" * 32, "kernel_class": "0.3.36-avx2-f16-1f0e9d2c"}
    workers = [worker, worker, worker | {"kernel_class": ""}]
    node.on("GET", "/api/admin/stats", STATS | {"workers": workers})
    shown = run("status").output
    assert shown.count("equal bits with nodes that say the same") == 1
    assert "kernels    0.3.36-avx2-f16-1f0e9d2c," in shown


def test_status_shows_how_far_downloads_and_shares_are(run: Run, node: FakeNode) -> None:
    part = {"model": "big", "n_layers": 12, "n_ready": 4, "complete": False}
    shares = [
        part | {"arrived_bytes": 1_000_000, "total_bytes": 3_000_000},
        part | {"model": "guide", "complete": True, "arrived_bytes": 5, "total_bytes": 5},
        part | {"model": "new", "model_id": "", "state": "fetched", "arrived_bytes": 0, "total_bytes": 0},
    ]
    loading = [{"model": "far", "phase": "fetching", "done": 1, "total": 4}]
    download = {
        "source": "hf:org/repo", "state": "fetching", "done_bytes": 2_000_000, "total_bytes": 8_000_000,
        "bytes_per_s": 1_000_000, "trouble": "",
    }  # fmt: skip
    node.on(
        "GET", "/api/admin/stats", STATS | {"shares": shares, "downloads": [download], "loading": loading}
    )
    shown = run("status").output
    assert "new  fetched\n" in shown
    assert "far  fetching, 25 %\n" in shown
    assert "big  4 of 12 layers, 1.0 MB of 3.0 MB fetched here\n" in shown
    assert "guide  complete\n" in shown
    assert "hf:org/repo  fetching  2.0 MB of 8.0 MB  1.0 MB/s, 6.0 s left\n" in shown


def test_status_shows_what_is_computed_for_other_nodes(run: Run, node: FakeNode) -> None:
    served = {
        "name": "guide", "model_id": "ab" * 32, "node_id": "12D3KooWThePeerOfNoName", "nickname": "",
        "layers": ["4:8"], "active": 2, "requests": 3, "tokens": 77, "tokens_per_s": 12.5,
    }  # fmt: skip
    idle = served | {"nickname": "at\x1btic", "active": 0}
    node.on("GET", "/api/admin/stats", STATS | {"serving": [served, idle]})
    shown = run("status").output
    assert "serving    guide  layers 4:8  for …OfNoName, 12.5 tokens/s, 77 tokens so far" in shown
    assert "tic, idle, 77 tokens so far" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("control", "data", "said"),
    [
        (True, True, "control port and data port yes; tried by …WPeer"),
        (
            True,
            False,
            "control port yes, data port no (a firewall, or network.announce; others see 192.0.2.9)",
        ),
        (False, False, "control port and data port no (a firewall"),
    ],
)
def test_status_says_whether_others_can_reach_the_node(
    run: Run, node: FakeNode, control: bool, data: bool, said: str
) -> None:
    found = {
        "checked_at": 0.0,
        "asked": "12D3KooWLongPeer",
        "control": [
            {"address": "/ip4/127.0.0.1/tcp/1", "reached": False},
            {"address": "x", "reached": control},
        ],
        "data": [{"address": "x", "reached": data}],
        "observed_ip": "192.0.2.9",
    }
    node.on("GET", "/api/admin/stats", STATS | {"reachability": found})
    assert said.replace("…WPeer", "…LongPeer") in run("status").output


def test_status_says_what_the_router_forwards_or_why_it_does_not(run: Run, node: FakeNode) -> None:
    for state, said in (
        ("mapped", "the gateway forwards both"),
        ("failed", "not forwarded: the gateway forwards both"),
    ):
        found = {"state": state, "detail": "the gateway forwards both"}
        node.on("GET", "/api/admin/stats", STATS | {"port_mapping": found})
        (line,) = [line for line in run("status").output.splitlines() if line.startswith("ports")]
        assert line.split(maxsplit=1)[1] == said
    node.on("GET", "/api/admin/stats", STATS | {"port_mapping": {"state": "idle", "detail": ""}})
    assert "\nports" not in run("status").output


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("on", "3 nodes answer, 2 models announced\n"),
        ("client", "3 nodes answer, 2 models announced (client: it answers nobody)"),
        ("off", "off: only models of connected nodes are found"),
    ],
)
def test_status_says_how_the_dht_fares(run: Run, node: FakeNode, mode: str, said: str) -> None:
    dht = {"mode": mode, "n_nodes": 3, "n_announced": 4}
    node.on("GET", "/api/admin/stats", STATS | {"dht": dht})
    assert said in run("status").output
    node.on("GET", "/api/admin/stats", STATS | {"dht": dht | {"n_nodes": 1, "n_announced": 2}})
    assert mode == "off" or "1 node answers, 1 model announced" in run("status").output


def test_status_of_a_node_that_is_not_ready_says_so(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/stats", STATS | {"ready": False, "models": [], "addresses": []})
    shown = run("status").output
    assert "not ready, up" in shown
    assert "see its log" in shown
    assert "swarmllm models load NAME" in shown
    reason = "guide 0:4, which was loaded before, is not: its file is gone"
    node.on("GET", "/api/admin/stats", STATS | {"ready": False, "reason": reason})
    assert reason in run("status").output


def test_peers_shows_distance_and_holdings(run: Run, node: FakeNode) -> None:
    node.on(
        "GET",
        "/api/admin/peers",
        {"peers": [PEER, PEER | {"rtt_ms": None, "models": [], "n_models": 0, "nickname": ""}]},
    )
    _, first, second = run("peers").output.splitlines()
    for expected in (
        "attic",
        "12D3KooWPeer",
        "1.2 ms",
        "direct",
        "2.0 kB",
        "10 B",
        "12.0 s",
        "guide 4:12; and 3 more",
    ):
        assert expected in first
    assert second.split()[0] == "-"


def test_peers_show_explains_a_node(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/peers/attic%20two", DETAILS)
    shown = run("peers", "show", "attic two").output
    for expected in (
        "attic  12D3KooWPeer", "direct, round trip 1.2 ms", "2.0 kB sent, 10 B received, at 250.0 MB/s",
        "2 jobs arrived damaged", "/ip4/192.0.2.8/tcp/8810",
        "0.23 of 1", "gets no work: 0.25 is needed", "1 x wrong bytes",
        "kernels    0.3.36-avx2-f16-1f0e9d2c, equal bits with nodes that say the same",
        "4 right, 2 disputed", "1970-01-01 00:00:00", "it lied",
    ):  # fmt: skip
        assert expected in shown
    node.on("GET", "/api/admin/peers/gone", DETAILS | {"connected": None})
    assert "not connected" in run("peers", "show", "gone").output


def test_peers_shows_who_has_left(run: Run, node: FakeNode) -> None:
    gone = {"node_id": "12D3KooWGone", "nickname": "", "left_at": time.time() - 30, "recently": True}
    held = [{"name": "guide", "layers": ["0:4", "8:12"]}]
    node.on("GET", "/api/admin/peers", {"peers": [PEER], "left": [gone | {"models": held}]})
    *_, empty, head, line = run("peers").output.splitlines()
    assert (empty, head.split()) == ("", ["left", "id", "when", "held"])
    assert re.fullmatch(r"- +12D3KooWGone +3\d\.0 s ago +guide 0:4, 8:12", line.rstrip()), line
    node.on("GET", "/api/admin/peers", {"peers": [], "left": [gone | {"models": []}]})
    shown = run("peers").output
    assert "--bootstrap" in shown
    assert "12D3KooWGone" in shown


def test_no_peers_says_how_to_get_one(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/peers", {"peers": []})
    assert "--bootstrap" in run("peers").output


@pytest.mark.parametrize(
    ("arguments", "path", "body"),
    [
        (["status"], "/api/admin/stats", STATS),
        (["peers"], "/api/admin/peers", {"peers": [PEER]}),
        (["peers", "show", "attic"], "/api/admin/peers/attic", DETAILS),
    ],
    ids=["status", "peers", "peer"],
)
def test_status_for_programs_is_what_the_daemon_said(
    run: Run, node: FakeNode, arguments: list[str], path: str, body: object
) -> None:
    node.on("GET", path, body)
    result = run(*arguments, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == body


def test_status_says_that_a_loaded_models_file_is_gone(node: FakeNode, run: Run) -> None:
    models = [STATS["models"][0] | {"trouble": "the file cannot be read"}]
    node.on("GET", "/api/admin/stats", STATS | {"models": models})
    assert "runs on, but cannot be loaded again: the file cannot be read" in run("status").stdout


def test_status_says_which_projector_cannot_be_used(node: FakeNode, run: Run) -> None:
    projectors = [{"name": "seer", "model_id": "ab", "cause": "it is gone", "remedy": "give it another"}]
    node.on("GET", "/api/admin/stats", STATS | {"projectors": projectors})
    assert "seer: it is gone; give it another" in run("status").stdout
