"""A private swarm shares a model out with one command: from a hub, in parts, onto three nodes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, clean_environment, running_daemon, wait_for
from deadlines import DEADLINE_S
from faulty_server import open_shelf
from other_guide import other_guide
from split_gguf import split_gguf

from swarmllm.guide import GUIDE_PATH
from swarmllm.models import build_manifest
from swarmllm.node.placing.plan import shape_of
from swarmllm.swarm.membership.network_key import NetworkFile, new_secret, private_network

pytestmark = [pytest.mark.slow, pytest.mark.long]

SHAPE = shape_of(build_manifest(GUIDE_PATH))
THIRD_GIB = (SHAPE.embedding_bytes + SHAPE.head_bytes + 4.5 * SHAPE.layer_bytes) / 2**30
"""Room for four layers, and at an end of the model too."""
NOWHERE = "http://127.0.0.1:9"
"""No hub is there."""


def command(node: DaemonProcess, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swarmllm", *words, "--api", node.url],
        env=clean_environment() | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )


@contextmanager
def private_nodes(
    folder: Path, names: str, hub: str = "", **auto_manage: Any
) -> Iterator[list[DaemonProcess]]:
    """They have a network key and a budget, and nothing else is said of sharing. `hub`: the address of the
    hub that they ask; else they are to ask one where nobody is."""
    network = private_network(new_secret())
    tables: dict[str, Any] = {
        "inference": {"n_threads": 1, "n_slots": 2},
        "auto_manage": {"max_memory_gib": THIRD_GIB, "interval_s": 0.3, **auto_manage},
    }
    with ExitStack() as stack:
        nodes: list[DaemonProcess] = []
        for name in names:
            (folder / name).mkdir(mode=0o700)
            NetworkFile(folder / name).change(lambda known: network)
            bootstrap = nodes[0].addresses if nodes else []
            nodes.append(
                stack.enter_context(
                    running_daemon(
                        folder,
                        name,
                        load=[],
                        bootstrap=bootstrap,
                        environment={"HF_ENDPOINT": hub or NOWHERE},
                        **tables,
                    )
                )
            )
        n_others = len(nodes) - 1
        for node in nodes:
            wait_for(lambda node=node: node.stats()["peers_connected"] == n_others, DEADLINE_S, "all to meet")
        yield nodes


def held(node: DaemonProcess) -> list[str]:
    return [layers for model in node.stats()["models"] for layers in model["layers"]]


def shares(node: DaemonProcess) -> list[dict[str, Any]]:
    return list(node.http.get("/api/admin/shares").json()["shares"])


def test_a_model_in_four_parts_is_shared_out_over_three_nodes_with_one_command(tmp_path: Path) -> None:
    whole = tmp_path / "whole.bin"
    whole.write_bytes(other_guide("S"))
    (tmp_path / "parts").mkdir()
    parts = split_gguf(whole, tmp_path / "parts", [0, 30, 71], stem="Big-Q8_0")
    with open_shelf() as hub, private_nodes(tmp_path, "abc") as nodes:
        a, b, c = nodes
        listing = {"siblings": [{"rfilename": part.name} for part in parts]}
        hub.files["/api/models/org/repo"] = json.dumps(listing).encode()
        for part in parts:
            hub.files[f"/org/repo/resolve/main/{part.name}"] = part.read_bytes()
        source = "hf:org/repo:Q8_0"

        unasked = command(a, "share", source, HF_ENDPOINT=hub.url)
        assert (unasked.returncode, shares(a)) == (2, []), unasked
        assert "--yes" in unasked.stderr
        assert hub.n_bytes == 0

        body = {"source": source, "hf_endpoint": hub.url}
        plan = a.http.post("/api/admin/shares/plan", json=body).raise_for_status().json()
        assert plan["complete"]
        assert [part["layers"] for part in plan["parts"]] != [["0:12"], [], []]
        assert plan["tokens_per_s"] > 0
        assert plan["spread"]
        assert plan["size_bytes"] > plan["download_bytes"] > 0
        assert a.http.get("/api/admin/downloads").json()["downloads"] == []
        hub.n_bytes = 0

        done = command(a, "share", source, "--name", "big", "--yes", HF_ENDPOINT=hub.url)
        assert done.returncode == 0, done
        assert "tokens/s" in done.stdout
        (kept,) = json.loads((tmp_path / "a" / "shares.json").read_text())["shared"]
        assert kept["source"] == f"hf:org/repo:{parts[0].name}"
        assert "big: complete." in done.stdout
        assert hub.n_bytes < 1.6 * len(other_guide("S")), "more than one node has fetched it from the hub"
        assert all(held(node) not in ([], ["0:12"]) for node in nodes)
        status = command(b, "status").stdout
        assert "big  complete" in status
        assert "placing    big  layers" in status

        asked = command(b, "run", "--model", "big", "--max-tokens", "8", "What is a pipeline?")
        assert asked.returncode == 0, asked
        assert asked.stdout.strip()
        answer = b.http.post(
            "/v1/chat/completions",
            json={"model": "big", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
        )
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-swarm-nodes"] == "3"

        ended = command(a, "unshare", "big")
        assert ended.returncode == 0, ended
        for node in nodes:
            wait_for(lambda node=node: held(node) == [], DEADLINE_S, "what was loaded for it to be dropped")
            wait_for(lambda node=node: shares(node) == [], DEADLINE_S, "the share to be forgotten")
        assert c.http.get("/api/admin/models").json()["models"]


def test_a_share_outlasts_its_daemon_and_leaves_what_a_person_loaded(tmp_path: Path) -> None:
    with private_nodes(tmp_path, "ab", max_memory_gib=2 * THIRD_GIB) as nodes:
        a, b = nodes
        b.http.post("/api/admin/models/guide/load", json={"layers": "0:2"}).raise_for_status()

        def shared() -> bool:
            return a.http.post("/api/admin/shares", json={"model": "guide"}).status_code == 200

        wait_for(shared, DEADLINE_S, "room for the guide")
        wait_for(lambda: shares(a)[0]["complete"], 2 * DEADLINE_S, "the guide to be complete")
        wait_for(lambda: len(held(b)) and held(b) != ["0:2"], 2 * DEADLINE_S, "b to take its part")
        a.process.send_signal(signal.SIGKILL)
        a.process.wait()
        (tmp_path / "a" / "daemon.json").unlink()
        assert json.loads((tmp_path / "a" / "shares.json").read_text())["shared"][0]["name"] == "guide"
        tables = {"auto_manage": {"max_memory_gib": 2 * THIRD_GIB, "interval_s": 0.3}}
        with running_daemon(tmp_path, "a", load=[], bootstrap=b.addresses, **tables) as again:
            wait_for(
                lambda: [share["complete"] for share in shares(again)] == [True],
                2 * DEADLINE_S,
                "the share to be complete again",
            )
            assert held(b) != ["0:2"]
            again.http.delete("/api/admin/shares/guide").raise_for_status()
            wait_for(lambda: held(b) == ["0:2"], DEADLINE_S, "b to keep only what a person loaded")
            wait_for(lambda: held(again) == [], DEADLINE_S, "a to drop its part")


def test_a_node_of_the_open_swarm_accepts_nothing_unless_it_says_so(tmp_path: Path) -> None:
    room = {"auto_manage": {"max_memory_gib": THIRD_GIB, "interval_s": 0.3}}
    with (
        running_daemon(tmp_path, "a", load=[], **room) as a,
        running_daemon(tmp_path, "b", load=[], bootstrap=a.addresses, **room) as b,
    ):
        wait_for(lambda: a.stats()["peers_connected"] == 1, DEADLINE_S, "both to meet")
        plan = wait_for(
            lambda: (found := a.http.get("/api/admin/shares/guide/plan").json())["refusing"] and found,
            DEADLINE_S,
            "a to have heard of b",
        )
        assert [node["nickname"] for node in plan["refusing"]] == ["b"]
        assert not plan["complete"]
        refused = command(a, "share", "guide", "--yes")
        assert refused.returncode == 1
        assert "auto_manage.accept" in refused.stdout + refused.stderr
        assert a.http.post("/api/admin/shares", json={"model": "guide"}).status_code == 409
        with open_shelf() as hub:
            hub.files["/other.gguf"] = other_guide("S")
            refused = command(a, "share", f"{hub.url}/other.gguf", "--yes")
            assert refused.returncode == 1
            assert "auto_manage.accept" in refused.stderr
            assert 0 < hub.n_bytes < len(other_guide("S")) / 2, "more than the header was fetched"
        assert a.http.get("/api/admin/downloads").json()["downloads"] == []
        assert shares(a) == shares(b) == []
