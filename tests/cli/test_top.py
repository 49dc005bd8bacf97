"""`swarmllm top` on a recorded state: what a terminal shows of the event stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from fake_node import TEXT_DELAY_FOREVER, FakeNode

from swarmllm.cli.top import PATH, strip

STAGES = [
    {
        "node": "node-a",
        "nickname": "kitchen",
        "layers": "0:8",
        "compute_ms_per_token": 1.0,
        "overhead_ms_per_token": 0.5,
        "network_ms_per_token": 0.25,
        "prefill_ms": 9.0,
    },
    {
        "node": "node-b",
        "nickname": "stu\x1bdy",
        "layers": "8:12",
        "compute_ms_per_token": 2.0,
        "overhead_ms_per_token": 0.0,
        "network_ms_per_token": 0.25,
        "prefill_ms": 9.0,
    },
]
REQUEST = {
    "model": "guide",
    "state": "decode",
    "elapsed_ms": 1500,
    "first_token_ms": 80,
    "generated_tokens": 40,
    "tokens_per_s": 123.4,
    "route": STAGES,
    "error": "",
}
STATE: dict[str, Any] = {
    "node": {
        "node_id": "node-a",
        "nickname": "kitchen",
        "tokens_per_s": 123.4,
        "resident_bytes": 100_000_000,
        "memory_total_bytes": 8_000_000_000,
        "memory_available_bytes": 5_000_000_000,
        "workers": [{"resident_bytes": 200_000_000}],
        "requests": {"active": 1, "queued": 2, "max": 8, "completed": 3, "failed": 1, "cancelled": 0},
    },
    "peers": {
        "peers": [
            {
                "node_id": "node-b",
                "nickname": "stu\x1bdy",
                "rtt_ms": 1.25,
                "data_plane": "direct",
                "memory_total_bytes": 0,
                "memory_free_bytes": 0,
            }
        ],
        "left": [
            {
                "node_id": "node-c",
                "nickname": "attic",
                "left_at": 0.0,
                "recently": False,
                "models": [{"name": "guide", "layers": ["8:12"]}],
            }
        ],
    },
    "models": {
        "models": [
            {
                "name": "guide",
                "n_layers": 12,
                "complete": False,
                "missing": ["10:12"],
                "holders": [{"node_id": "node-a", "nickname": "kitchen", "layers": ["0:8"]}],
            }
        ]
    },
    "requests": {"live": [REQUEST], "recent": [REQUEST | {"state": "failed", "error": "it broke"}]},
    "downloads": {
        "downloads": [
            {"source": "hf:a/b", "state": "fetching", "done_bytes": 1, "total_bytes": 4},
            {"source": "hf:c/d", "state": "done", "done_bytes": 4, "total_bytes": 4},
        ]
    },
    "work": {
        "running": [{"kind": "load", "model": "x", "phase": "loading", "done_bytes": 0, "total_bytes": 0}]
    },
}


@pytest.fixture
def recorded(node: FakeNode) -> FakeNode:
    first = STATE | {"node": STATE["node"] | {"tokens_per_s": None}}
    sections = [section(name, data) for name, data in first.items()]
    node.on("GET", PATH, [b": hello\n\n", *sections, section("node", STATE["node"]), TEXT_DELAY_FOREVER])
    return node


def section(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def test_once_shows_nodes_layers_pipelines_and_what_is_in_progress(
    recorded: FakeNode, run: Callable[..., Result]
) -> None:
    result = run("top", "--once")
    assert result.exit_code == 0, result.output
    shown = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in (
        "kitchen 123 tokens/s · 1 of 8 running, 2 waiting · 3 completed, 1 failed"
        " · 300.0 MB of 8.0 GB memory",
        "kitchen (this node) node-a - - 5.0 GB of 8.0 GB",
        "stu\\x1bdy node-b 1.2 ms direct -",
        "left id when held",
        "guide 12 layers, layers 10:12 missing",
        "kitchen ████████····",
        "missing ··········██",
        "guide decode 40 123 1.5 s kitchen 0:8 1.50, 0.25 → stu\\x1bdy 8:12 2.00, 0.25",
        "guide it broke 40 123 80 ms kitchen 0:8 → stu\\x1bdy 8:12",
        "load x loading -",
        "fetch hf:a/b fetching 1 B of 4 B",
    ):
        assert line in shown
    assert any(line.startswith("attic node-c ") and line.endswith(" ago guide 8:12") for line in shown)
    assert not any("hf:c/d" in line for line in shown)
    assert "\x1b" not in result.stdout


def test_json_is_the_whole_state(recorded: FakeNode, run: Callable[..., Result]) -> None:
    assert json.loads(run("top", "--json").stdout) == STATE


def test_a_node_that_leaves_before_it_has_said_all_is_a_failure(
    node: FakeNode, run: Callable[..., Result]
) -> None:
    node.on("GET", PATH, [b"event: node\ndata: {}\n\n"])
    result = run("top")
    assert result.exit_code == 1
    assert "closed the connection" in result.stderr


def test_a_key_that_may_not_look_is_told_so(node: FakeNode, run: Callable[..., Result]) -> None:
    error = {"message": "Key app may use models.", "type": "permission_error", "code": "forbidden"}
    node.on("GET", PATH, {"error": error}, 403)
    result = run("top")
    assert result.exit_code == 4
    assert "Key app may use models" in result.stderr


def test_strips_of_large_models_show_what_is_held_in_part() -> None:
    assert strip(["0:40"], 80) == "█" * 16 + "·" * 16
    assert strip(["0:1"], 64) == "▒" + "·" * 31
    assert strip([], 3) == "···"
