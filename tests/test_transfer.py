"""A model spreads: one node has its file, the others load ranges of it by name, with nothing but the
swarm."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S
from other_guide import other_guide

from swarmllm.models import LayerRange, build_manifest, needed_tensors

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is a pipeline?"}]
NAME = "traveller"
INFERENCE = {"n_threads": 1, "n_slots": 2}


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    path.write_bytes(other_guide("G"))
    return path


def lines(node: DaemonProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with node.http.stream("POST", f"/api/admin/models{path}", json=body) as answer:
        return [json.loads(line) for line in answer.iter_lines()]


def load(node: DaemonProcess, layers: str) -> list[dict[str, Any]]:
    events = lines(node, f"/{NAME}/load", {"layers": layers})
    assert events[-1]["type"] == "result", events[-1]
    return events


def gives(node: DaemonProcess, n_nodes: int = 1) -> bool:
    answer = node.http.get(f"/api/admin/models/{NAME}/status")
    return answer.status_code == 200 and len(answer.json()["sources"]) >= n_nodes


def fetched_bytes(node: DaemonProcess) -> int:
    return int(node.stats()["travel"]["fetched_bytes"])


def ask(node: DaemonProcess, model: str = NAME) -> str:
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as ai:
        answer = ai.chat.completions.create(
            model=model,
            messages=QUESTION,
            temperature=0,
            max_tokens=40,  # type: ignore[arg-type]
        )
    return answer.choices[0].message.content or ""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, model_file: Path) -> Iterator[tuple[DaemonProcess, ...]]:
    folder = tmp_path_factory.mktemp("travel")
    with (
        running_daemon(folder, "a", load=[], inference=INFERENCE) as a,
        running_daemon(folder, "b", load=[], inference=INFERENCE, bootstrap=a.addresses) as b,
        running_daemon(folder, "c", load=[], inference=INFERENCE, bootstrap=a.addresses) as c,
    ):
        assert lines(a, "", {"path": str(model_file), "name": NAME})[-1]["type"] == "result"
        for node in (b, c):
            wait_for(lambda node=node: gives(node), DEADLINE_S, "everybody to know who has the file")
        yield a, b, c
        assert [node.stop() for node in (a, b, c)] == [0, 0, 0]


def test_three_nodes_run_what_one_of_them_had(
    nodes: tuple[DaemonProcess, ...], model_file: Path, tmp_path: Path
) -> None:
    a, b, c = nodes
    manifest = build_manifest(model_file)
    events = load(b, "4:8")
    needed = needed_tensors(manifest, LayerRange(4, 8))
    weights = sum(tensor.size_bytes for tensor in needed)
    description = fetched_bytes(b) - weights
    header_bytes = min(tensor.offset for tensor in manifest.tensors)
    assert header_bytes < description < header_bytes + 300 * len(manifest.shards[-1].tensors) + 64_000
    assert {event.get("phase") for event in events[:-1]} == {"fetching", "loading"}
    fetching = [event for event in events if event.get("phase") == "fetching"]
    assert (fetching[-1]["done_bytes"], fetching[-1]["total_bytes"]) == (weights, weights)
    model = events[-1]["model"]
    assert model["loaded"] == ["4:8"]
    assert model["files"] == {"layers": ["4:8"], "embedding": False, "head": False}
    folder = Path(model["path"]).parent
    on_disk = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
    assert weights * 0.9 < on_disk < (weights + description) * 1.1, "a loaded layer lies in one file only"

    wait_for(lambda: gives(c, 2), DEADLINE_S, "the last node to know both holders")
    load(c, "8:12")
    load(a, "0:4")
    for node in nodes:
        wait_for(
            lambda node=node: node.http.get(f"/api/admin/models/{NAME}/status").json()["complete"],
            DEADLINE_S,
            "every node to know holders of all layers",
        )
    wait_for(lambda: b.http.get("/api/admin/models/guide/status").json()["sources"], DEADLINE_S, "the guide")
    assert lines(a, "/guide/load", {})[-1]["type"] == "result"
    expected = ask(a, "guide")
    assert expected
    assert [ask(node) for node in nodes] == [expected] * 3
    for node in (b, c):
        verified = lines(node, f"/{NAME}/verify", {})[-1]
        assert verified["damaged"] == []
        assert verified["model"]["files"]["embedding"], "it was asked, so it embeds prompts"


def test_a_node_killed_while_it_fetches_goes_on_where_it_was(tmp_path: Path, model_file: Path) -> None:
    """Killed again and again, at other moments each time; in the end everything is there and right."""
    dice = random.Random(4)
    manifest = build_manifest(model_file)
    total_bytes = sum(tensor.size_bytes for tensor in needed_tensors(manifest, manifest.whole))
    slow = {"upload_mib_s": 8.0}
    with running_daemon(tmp_path, "a", load=[], store=slow) as a:
        assert lines(a, "", {"path": str(model_file), "name": NAME})[-1]["type"] == "result"
        kept: list[int] = []
        for _ in range(4):
            with running_daemon(tmp_path, "b", load=[], bootstrap=a.addresses) as b:
                wait_for(lambda b=b: gives(b), DEADLINE_S, "b to know who has the file")
                stop_at = dice.uniform(0.05, 0.3) * total_bytes
                with b.http.stream("POST", f"/api/admin/models/{NAME}/load", json={}) as answer:
                    first, missing_bytes = None, 0
                    for line in answer.iter_lines():
                        event = json.loads(line)
                        assert event["type"] == "progress", event
                        if event["phase"] != "fetching":
                            break
                        if first is None:
                            first, missing_bytes = event["done_bytes"], event["total_bytes"]
                        if event["done_bytes"] - first > stop_at:
                            break
                    kept.append(total_bytes - missing_bytes)
                    os.kill(b.process.pid, signal.SIGKILL)
                    b.process.wait()
            (tmp_path / "b" / "daemon.json").unlink(missing_ok=True)
        assert kept[0] == 0
        assert kept == sorted(kept)
        assert kept[-1] > 0
        with running_daemon(tmp_path, "b", load=[], bootstrap=a.addresses) as b:
            wait_for(lambda: gives(b), DEADLINE_S, "b to know who has the file")
            assert load(b, f"0:{manifest.n_layers}")[-1]["model"]["complete"]
            assert lines(b, f"/{NAME}/verify", {})[-1]["damaged"] == []
            assert fetched_bytes(b) < total_bytes
            assert ask(b)
            folder = Path(b.http.get(f"/api/admin/models/{NAME}/status").json()["path"]).parent
            assert b.http.post(f"/api/admin/models/{NAME}/pin", json={}).json()["pinned"]
            assert b.http.delete(f"/api/admin/models/{NAME}").status_code == 409
            assert b.http.post(f"/api/admin/models/{NAME}/unload", json={}).status_code == 200
            assert b.http.delete(f"/api/admin/models/{NAME}").status_code == 200
            assert not folder.exists()
            assert b.stop() == 0


def test_a_node_can_start_with_layers_that_only_others_have(tmp_path: Path, model_file: Path) -> None:
    with running_daemon(tmp_path, "a", load=[]) as a:
        assert lines(a, "", {"path": str(model_file), "name": NAME})[-1]["type"] == "result"
        with running_daemon(tmp_path, "b", load=[f"{NAME}:4:8"], bootstrap=a.addresses) as b:
            wait_for(
                lambda: b.http.get("/health/ready").status_code == 200, DEADLINE_S, "b to have its layers"
            )
            assert b.stats()["models"][0]["layers"] == ["4:8"]


def peers(node: DaemonProcess) -> set[str]:
    return {peer["node_id"] for peer in node.http.get("/api/admin/peers").json()["peers"]}


def test_a_model_of_a_node_beyond_the_connected_ones_is_found_and_those_of_the_dead_are_not(
    tmp_path: Path, model_file: Path
) -> None:
    """Each node looks for one connection only, as in a swarm too large for a full mesh. Only the one in the
    middle answers in the DHT, so that no lookup meets the holder by the way: it is dialled when it is
    needed."""
    few, aside = {"max_peers": 1}, {"max_peers": 1, "dht": "client"}
    model_id = build_manifest(model_file).model_id
    with running_daemon(tmp_path, "middle", load=[], network=few) as middle:

        def one_more(name: str) -> Any:
            return running_daemon(tmp_path, name, load=[], bootstrap=middle.addresses, network=aside)

        def knows_its_way(node: DaemonProcess) -> bool:
            return peers(node) == {middle.node_id} and bool(node.stats()["dht"]["n_nodes"])

        with one_more("holder") as holder:
            assert lines(holder, "", {"path": str(model_file), "name": NAME})[-1]["type"] == "result"
            told = holder.stats()["dht"]["n_announced"]
            assert told == 4, "two keys for the guide, two for this one"
            wait_for(lambda: middle.stats()["dht"]["n_records"] == told, DEADLINE_S, "the DHT to have them")
            with one_more("by-name") as seeker:
                wait_for(lambda: knows_its_way(seeker), DEADLINE_S, "it to know the one in the middle")
                assert gives(seeker), "a record says so"
                assert load(seeker, "4:8")[-1]["model"]["loaded"] == ["4:8"]
                assert peers(seeker) == {middle.node_id, holder.node_id}
                assert seeker.stop() == 0
            with one_more("by-id") as seeker:
                wait_for(lambda: knows_its_way(seeker), DEADLINE_S, "it to know the one in the middle")
                found = lines(seeker, f"/{model_id}/load", {"layers": "0:4"})[-1]
                assert found["model"]["files"] == {"layers": ["0:4"], "embedding": True, "head": False}
                assert seeker.stop() == 0
            os.kill(holder.process.pid, signal.SIGKILL)
            wait_for(lambda: holder.node_id not in peers(middle), DEADLINE_S, "the dead to be missed")
        n_kept = middle.stats()["dht"]["n_records"]
        assert n_kept >= told, "the DHT names the dead for hours"
        with one_more("late") as late:
            wait_for(lambda: knows_its_way(late), DEADLINE_S, "it to know the one in the middle")
            for wanted in (NAME, model_id):
                refused = late.http.post(f"/api/admin/models/{wanted}/load", json={"layers": "0:4"})
                assert refused.status_code == 404
            assert late.stats()["dht"]["n_lookups"] >= 2
            assert peers(late) == {middle.node_id}
            assert late.http.get(f"/api/admin/models/{NAME}/status").status_code == 404
            assert late.stop() == 0
        assert middle.stop() == 0
