"""status, peers and models: what is sent, what is shown, what a program gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fake_node import FakeNode, ndjson

from swarmllm.cli.errors import EXIT_FAILED, EXIT_REFUSED, EXIT_USAGE

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

MODEL: dict[str, Any] = {
    "name": "guide",
    "model_id": "ab" * 32,
    "path": "/models/guide.gguf",
    "architecture": "llama",
    "n_layers": 12,
    "context_length": 2048,
    "size_bytes": 9_300_000,
    "cut_alignment": 1,
    "whole_reason": "",
    "loaded": ["0:4"],
    "memory": {"weights_bytes": 9_000_000, "kv_bytes": 24_000_000, "work_bytes": 31_000_000},
    "settings": {"n_ctx": 2048, "n_threads": 1, "kv_type": "f16", "use_mmap": True, "use_mlock": False},
    "stored": True,
    "pinned": True,
    "files": {"layers": ["0:4", "6:8"], "embedding": True, "head": False},
    "sources": ["12D3KooWPeer"],
    "holders": [{"node_id": "12D3KooWSelf", "nickname": "kitchen", "layers": ["0:4"], "is_self": True}],
    "complete": False,
    "missing": ["4:12"],
    "waiting": None,
}

FOREIGN = MODEL | {
    "name": "far\x1b[2J",
    "architecture": None,
    "size_bytes": None,
    "loaded": [],
    "holders": [{}, {}],
    "complete": True,
    "missing": [],
}

WAITING = MODEL | {
    "name": "stranger",
    "model_id": "",
    "path": None,
    "architecture": None,
    "size_bytes": None,
    "files": None,
    "sources": [],
    "loaded": [],
    "holders": [],
    "missing": ["0:12"],
    "waiting": {
        "source": "hf:org/repo:x\x1b[2J.gguf",
        "size_bytes": 9_300_000,
        "architecture": "llama",
        "layers": ["0:4"],
        "waits_for": "the hashes of layers 4:12, head",
        "contradictions": [{"tensor": "blk.5.ffn_up.weight", "nodes": ["12D3KooWPeer", "12D3KooWOther"]}],
    },
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
    "models": [{"name": "guide", "model_id": "ab" * 32, "layers": ["4:12"]}],
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
        "counts": {"wrong bytes": 1},
        "recent": [
            {"at": 0.0, "deed": "wrong bytes", "meaning": "it lied", "detail": "blk.0", "score": 0.225}
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


def test_status_of_a_node_that_is_not_ready_says_so(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/stats", STATS | {"ready": False, "models": [], "addresses": []})
    shown = run("status").output
    assert "not ready (see its log)" in shown
    assert "swarmllm models load NAME" in shown


@pytest.mark.parametrize(
    ("arguments", "path", "body"),
    [
        (["status"], "/api/admin/stats", STATS),
        (["peers"], "/api/admin/peers", {"peers": [PEER]}),
        (["peers", "show", "attic"], "/api/admin/peers/attic", DETAILS),
        (["models", "list"], "/api/admin/models", {"models": [MODEL, FOREIGN]}),
    ],
    ids=["status", "peers", "peer", "models"],
)
def test_json_is_what_the_daemon_said(
    run: Run, node: FakeNode, arguments: list[str], path: str, body: object
) -> None:
    node.on("GET", path, body)
    result = run(*arguments, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == body


def test_peers_shows_distance_and_holdings(run: Run, node: FakeNode) -> None:
    node.on(
        "GET", "/api/admin/peers", {"peers": [PEER, PEER | {"rtt_ms": None, "models": [], "nickname": ""}]}
    )
    _, first, second = run("peers").output.splitlines()
    for expected in ("attic", "12D3KooWPeer", "1.2 ms", "direct", "2.0 kB", "10 B", "12.0 s", "guide 4:12"):
        assert expected in first
    assert second.split()[0] == "-"


def test_peers_show_explains_a_node(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/peers/attic%20two", DETAILS)
    shown = run("peers", "show", "attic two").output
    for expected in (
        "attic  12D3KooWPeer", "direct, round trip 1.2 ms", "2.0 kB sent, 10 B received, at 250.0 MB/s",
        "2 jobs arrived damaged", "/ip4/192.0.2.8/tcp/8810",
        "0.23 of 1", "gets no work: 0.25 is needed", "1 x wrong bytes", "1970-01-01 00:00:00", "it lied",
    ):  # fmt: skip
        assert expected in shown
    node.on("GET", "/api/admin/peers/gone", DETAILS | {"connected": None})
    assert "not connected" in run("peers", "show", "gone").output


def test_no_peers_says_how_to_get_one(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/peers", {"peers": []})
    assert "--bootstrap" in run("peers").output


def test_models_list_shows_what_is_missing_and_what_is_complete(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/models", {"models": [MODEL, FOREIGN, WAITING]})
    _, own, foreign, waiting = run("models", "list").output.splitlines()
    for expected in ("guide", "abababababab", "llama", "12", "9.3 MB", "0:4", "layers 4:12 missing"):
        assert expected in own
    assert "far\\x1b[2J" in foreign
    assert "complete on 2 nodes" in foreign
    for expected in ("stranger", "fetched: 0:4", "waiting for the hashes of layers 4:12, head"):
        assert expected in waiting


def test_a_model_that_waits_for_its_id_says_for_what_and_whom_it_does_not_believe(
    run: Run, node: FakeNode
) -> None:
    node.on("GET", "/api/admin/models/stranger/status", WAITING)
    shown = run("models", "show", "stranger").output
    for expected in (
        "not known yet", "hf:org/repo:x\\x1b[2J.gguf", "layers 0:4", "the hashes of layers 4:12, head",
        "blk.5.ffn_up.weight: 12D3KooWPeer, 12D3KooWOther; they are not believed",
    ):  # fmt: skip
        assert expected in shown
    assert json.loads(run("models", "show", "stranger", "--json").output) == WAITING
    node.on("DELETE", "/api/admin/models/stranger", WAITING)
    assert "what was fetched of it is deleted" in run("models", "rm", "stranger").output


def test_no_models_says_how_to_add_one(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/models", {"models": []})
    assert "swarmllm models add" in run("models", "list").output


PLAN: dict[str, Any] = {
    "model": "guide",
    "prompt_tokens": 10,
    "output_tokens": 300,
    "cost_s": 1.25,
    "ends_s": 0.0005,
    "stages": [
        {
            "node_id": "12D3KooWSelf",
            "nickname": "kitchen",
            "layers": "0:8",
            "compute_s": 0.5,
            "network_s": 0.25,
            "measured": True,
            "standby": None,
            "alternatives": [
                {
                    "node_id": "12D3KooWBusy",
                    "nickname": "cellar",
                    "layers": "0:8",
                    "extra_s": 0.1,
                    "full": True,
                },
            ],
        },
        {
            "node_id": "12D3KooWPeer",
            "nickname": "attic\x1b[2J",
            "layers": "8:12",
            "compute_s": 0.25,
            "network_s": 0.25,
            "measured": False,
            "standby": "12D3KooWAway",
            "alternatives": [
                {
                    "node_id": "12D3KooWAway",
                    "nickname": "shed",
                    "layers": "8:12",
                    "extra_s": 3.0,
                    "full": False,
                },
                {
                    "node_id": "12D3KooWLoft",
                    "nickname": "loft",
                    "layers": "6:12",
                    "extra_s": 4.0,
                    "full": False,
                },
            ],
        },
    ],
    "rivals": [
        {"name": "all at home", "cost_s": None, "stages": []},
        {
            "name": "fewest stages",
            "cost_s": 2.5,
            "stages": [{"node_id": "12D3KooWAway", "nickname": "shed", "layers": "0:12"}],
        },
    ],
}
PLAN_PATH = "/api/admin/plan?model=guide&prompt_tokens=10&output_tokens=300"


def test_plan_shows_the_route_and_why_not_another(run: Run, node: FakeNode) -> None:
    node.on("GET", PLAN_PATH, PLAN)
    result = run("plan", "guide", "--prompt-tokens", "10", "--output-tokens", "300")
    head, _, first, second, ends, home, fewest = result.output.splitlines()
    assert head == "guide, 10 + 300 tokens: 1.2 s expected"
    for expected in ("kitchen", "0:8", "500.0 ms", "250.0 ms", "measured", "cellar is full"):
        assert expected in first
    for expected in ("attic\\x1b[2J", "8:12", "estimate", "shed", "shed +3.0 s", "loft with 6:12 +4.0 s"):
        assert expected in second
    assert "0.5 ms" in ends
    assert home == "all at home: not possible, layers are missing or cut elsewhere"
    assert fewest == "fewest stages: 2.5 s (0:12@shed)"


def test_plan_for_programs_is_what_the_daemon_said(run: Run, node: FakeNode) -> None:
    node.on("GET", PLAN_PATH, PLAN)
    result = run("plan", "guide", "--prompt-tokens", "10", "--output-tokens", "300", "--json")
    assert json.loads(result.stdout) == PLAN


def test_a_plan_for_no_tokens_is_wrong_usage(run: Run, node: FakeNode) -> None:
    assert run("plan", "guide", "--output-tokens", "0").exit_code == EXIT_USAGE
    assert node.requests == []


PROGRESS = {"type": "progress", "done_bytes": 1, "total_bytes": 2}


def test_load_sends_the_layers_and_reports_what_is_held(run: Run, node: FakeNode) -> None:
    node.on("POST", "/api/admin/models/guide/load", ndjson(PROGRESS, {"type": "result", "model": MODEL}))
    result = run("models", "load", "guide", "--layers", "0:4")
    assert result.exit_code == 0
    assert "this node now holds layers 0:4" in result.stdout
    assert "layers 4:12 missing" in result.stdout
    assert node.bodies("/api/admin/models/guide/load") == [{"layers": "0:4"}]


def test_load_without_layers_asks_for_all(run: Run, node: FakeNode) -> None:
    node.on("POST", "/api/admin/models/a%2Fb/load", ndjson({"type": "result", "model": MODEL}))
    result = run("models", "load", "a/b", "--json")
    assert json.loads(result.stdout) == MODEL
    assert node.bodies("/api/admin/models/a%2Fb/load") == [{"layers": None}]


def test_load_sends_the_options_that_were_given(run: Run, node: FakeNode) -> None:
    node.on("POST", "/api/admin/models/guide/load", ndjson({"type": "result", "model": MODEL}))
    options = "--ctx 8192 --threads 3 --gpu-layers 4 --kv-type q8_0 --flash-attention auto --no-mmap --mlock"
    assert run("models", "load", "guide", *options.split()).exit_code == 0
    assert node.bodies("/api/admin/models/guide/load") == [
        {
            "layers": None,
            "n_ctx": 8192,
            "n_threads": 3,
            "n_gpu_layers": 4,
            "kv_type": "q8_0",
            "flash_attention": "auto",
            "use_mmap": False,
            "use_mlock": True,
        }
    ]
    assert run("models", "load", "guide", "--ctx", "8").exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("kind", "code"), [("invalid_request_error", EXIT_REFUSED), ("server_error", EXIT_FAILED)]
)
def test_load_that_fails_half_way_fails(run: Run, node: FakeNode, kind: str, code: int) -> None:
    failure = {"type": "error", "error": {"message": "cannot be cut at 5", "type": kind}}
    node.on("POST", "/api/admin/models/guide/load", ndjson(PROGRESS, failure))
    result = run("models", "load", "guide")
    assert (result.exit_code, "cannot be cut at 5" in result.stderr) == (code, True)


def test_load_whose_daemon_goes_away_fails(run: Run, node: FakeNode) -> None:
    node.on("POST", "/api/admin/models/guide/load", ndjson(PROGRESS))
    assert run("models", "load", "guide").exit_code == EXIT_FAILED


def test_add_sends_the_absolute_path(
    run: Run, node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    whole = MODEL | {"whole_reason": "its layers share KV"}
    node.on("POST", "/api/admin/models", ndjson({"type": "result", "model": whole}))
    result = run("models", "add", "m.gguf", "--name", "mine")
    assert result.exit_code == 0
    assert "12 layers, 9.3 MB" in result.stdout
    assert "only be loaded whole: its layers share KV" in result.stdout
    assert node.bodies("/api/admin/models") == [{"path": str(tmp_path / "m.gguf"), "name": "mine"}]


def test_add_of_a_file_that_is_not_there_is_a_usage_error(run: Run, node: FakeNode) -> None:
    assert run("models", "add", "/nowhere.gguf").exit_code == EXIT_USAGE
    assert node.requests == []


@pytest.mark.parametrize(
    ("loaded", "words"), [([], "holds no layers now"), (["0:2"], "still holds layers 0:2")]
)
def test_unload_says_what_is_left(run: Run, node: FakeNode, loaded: list[str], words: str) -> None:
    left = {"type": "result", "model": MODEL | {"loaded": loaded}}
    node.on("POST", "/api/admin/models/guide/unload", ndjson(PROGRESS, left))
    result = run("models", "unload", "guide", "--layers", "2:4")
    assert words in result.stdout
    assert node.bodies("/api/admin/models/guide/unload") == [{"layers": "2:4", "progress": True}]


def test_show_tells_what_is_here_and_who_has_the_rest(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/models/guide/status", MODEL)
    shown = run("models", "show", "guide").output
    for expected in (
        "ab" * 32, "9.3 MB", "2048", "at multiples of 1", "/models/guide.gguf", "other nodes (pinned)",
        "0:4, 6:8, embedding", "layers 4:12 missing", "kitchen: 0:4", "12D3KooWPeer",
        "n_threads 1", "use_mlock off",
    ):  # fmt: skip
        assert expected in shown
    assert json.loads(run("models", "show", "guide", "--json").output) == MODEL


def test_show_of_a_model_that_only_others_have_is_short(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/models/far/status", FOREIGN | {"files": None, "holders": []})
    shown = run("models", "show", "far").output
    assert "far\\x1b[2J" in shown
    assert "architecture" not in shown


def test_verify_fails_where_something_is_damaged(run: Run, node: FakeNode) -> None:
    path = "/api/admin/models/guide/verify"
    node.on("POST", path, ndjson(PROGRESS, {"type": "result", "model": MODEL, "damaged": []}))
    right = run("models", "verify", "guide")
    assert (right.exit_code, "what is here is right" in right.stdout) == (0, True)
    node.on("POST", path, ndjson({"type": "result", "model": MODEL, "damaged": ["blk.0.x", "blk.1.x"]}))
    wrong = run("models", "verify", "guide", "--json")
    assert wrong.exit_code == EXIT_FAILED
    assert json.loads(wrong.stdout)["damaged"] == ["blk.0.x", "blk.1.x"]
    assert "2 parts of guide are damaged (blk.0.x, blk.1.x); load it again" in wrong.stderr


@pytest.mark.parametrize(
    ("command", "pinned", "words"), [("pin", True, "it stays"), ("unpin", False, "it may be removed")]
)
def test_pin_and_unpin_say_what_happens_when_room_is_needed(
    run: Run, node: FakeNode, command: str, pinned: bool, words: str
) -> None:
    node.on("POST", "/api/admin/models/guide/pin", MODEL | {"pinned": pinned})
    assert words in run("models", command, "guide").stdout
    assert node.bodies("/api/admin/models/guide/pin") == [{"pinned": pinned}]


@pytest.mark.parametrize(
    ("stored", "words"), [(True, "fetched of it is deleted"), (False, "its file stays at /models/guide.gguf")]
)
def test_rm_says_what_became_of_the_file(run: Run, node: FakeNode, stored: bool, words: str) -> None:
    node.on("DELETE", "/api/admin/models/guide", MODEL | {"stored": stored})
    assert words in run("models", "rm", "guide").stdout
