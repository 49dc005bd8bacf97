"""A model that no node has whole, nor could have: each fetches the layers that it is going to hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from daemon_process import wait_for
from deadlines import DEADLINE_S
from faulty_server import FaultyServer, open_shelf
from other_guide import other_guide
from split_gguf import split_gguf
from test_sharing_daemons import command, held, private_nodes, shares

from swarmllm.models import build_manifest

pytestmark = [pytest.mark.slow, pytest.mark.long]

MODEL = other_guide("T")


def publish(hub: FaultyServer, folder: Path) -> str:
    """The model in four parts as org/repo; the name of the first."""
    folder.mkdir()
    (folder / "whole.bin").write_bytes(MODEL)
    parts = split_gguf(folder / "whole.bin", folder, [0, 30, 71], stem="Big-Q8_0")
    listing = {"siblings": [{"rfilename": part.name} for part in parts]}
    hub.files["/api/models/org/repo"] = json.dumps(listing).encode()
    for part in parts:
        hub.files[f"/org/repo/resolve/main/{part.name}"] = part.read_bytes()
    return parts[0].name


def stored_bytes(data_dir: Path) -> int:
    files = [path for path in data_dir.rglob("*.gguf") if path.is_file()]
    return sum({path.stat().st_ino: path.stat().st_blocks * 512 for path in files}.values())


def test_a_model_that_fits_no_disk_is_shared_by_nodes_that_fetch_their_own_layers(tmp_path: Path) -> None:
    with open_shelf() as hub, private_nodes(tmp_path, "abc", hub.url) as nodes:
        a, b, _ = nodes
        first = publish(hub, tmp_path / "hub")

        body = {"source": "hf:org/repo:Q8_0", "hf_endpoint": hub.url}
        plan = a.http.post("/api/admin/shares/plan", json=body).raise_for_status().json()
        assert plan["complete"]
        assert plan["spread"]
        assert plan["download_bytes"] < 0.6 * len(MODEL)
        hub.asked.clear()
        done = command(a, "share", "hf:org/repo:Q8_0", "--name", "big", "--yes", HF_ENDPOINT=hub.url)
        assert done.returncode == 0, done
        assert "each node fetches its layers from its hub" in done.stdout
        assert "big: complete." in done.stdout
        parts = {name: len(file) for name, file in hub.files.items() if len(file) > 1.3 * 2**20}
        assert len(parts) >= 2
        ends = [span for name, n in parts.items() for span in hub.spans(name) if span[1] >= n - 1]
        assert len(parts) <= len(ends) <= len(parts) + 1, "layers were fetched more than once"
        for node in nodes:
            assert held(node) not in ([], ["0:12"])
            assert 0 < stored_bytes(node.data_dir) < 0.7 * len(MODEL)
        whole = build_manifest(tmp_path / "hub" / "whole.bin")
        (shared,) = shares(b)
        assert (shared["model"], shared["model_id"]) == ("big", whole.model_id)
        (kept,) = json.loads((tmp_path / "a" / "shares.json").read_text())["shared"]
        assert kept["source"] == f"hf:org/repo:{first}"

        asked = command(b, "run", "--model", "big", "--max-tokens", "8", "What is a pipeline?")
        assert asked.returncode == 0, asked
        assert asked.stdout.strip()


def test_what_a_node_cannot_fetch_another_one_does(tmp_path: Path) -> None:
    """Only the first node reaches the hub."""
    with open_shelf() as hub, private_nodes(tmp_path, "abc") as nodes:
        a, b, _ = nodes
        publish(hub, tmp_path / "hub")
        body = {"source": "hf:org/repo:Q8_0", "name": "big", "hf_endpoint": hub.url}
        assert a.http.post("/api/admin/shares/published", json=body).status_code == 200
        wait_for(lambda: any(each["complete"] for each in shares(a)), 3 * DEADLINE_S, "the model to be held")
        assert all(held(node) not in ([], ["0:12"]) for node in nodes)
        asked = command(b, "run", "--model", "big", "--max-tokens", "8", "What is a pipeline?")
        assert asked.returncode == 0, asked
