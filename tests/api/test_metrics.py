"""GET /metrics and Server-Timing, over HTTP; and the page that documents the metrics."""

from __future__ import annotations

import os
import platform
import re
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import trio
from api_fakes import Script, Stand, serve_node
from deadlines import DEADLINE_S
from node_ids import NODE_B
from prometheus_client.parser import text_string_to_metric_families

from swarmllm import __version__
from swarmllm.errors import NoPipeline
from swarmllm.node.metric_definitions import (
    DEFINITIONS,
    DHT_NODES,
    DHT_RECORDS,
    OF_BOOTSTRAP_NODES,
    reference,
)
from swarmllm.workerpool import WorkerStatistics
from swarmllm_proto.codec import encode_record
from swarmllm_proto.swarm import NodeRecord, ShardAnnounce

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
CHAT = "/v1/chat/completions"
HELLO = {"model": "guide", "messages": [{"role": "user", "content": "hello"}]}

Samples = dict[tuple[str, tuple[str, ...]], float]


async def scrape(stand: Stand) -> Samples:
    """(name, label values) -> value."""
    answer = await stand.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.text)
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.slow
async def test_requests_are_counted_and_timed_by_how_they_end(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await stand.http.post(CHAT, json=HELLO)
        stand.pipelines.script = Script(fail_before=NoPipeline("nobody"))
        await stand.http.post(CHAT, json=HELLO)
        stand.pipelines.script = Script(hold_after=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(stand.http.post, CHAT, json=HELLO))
            while len(stand.pipelines.calls) < 3:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        with trio.fail_after(DEADLINE_S):
            await stand.pipelines.calls[-1].ended.wait()
        samples = await scrape(stand)
    requests = "swarmllm_inference_requests_total"
    assert {labels[1]: n for (name, labels), n in samples.items() if name == requests} == {
        "completed": 1,
        "failed": 1,
        "cancelled": 1,
    }
    guide = ("guide",)
    assert samples["swarmllm_inference_latency_seconds_count", guide] == 1
    assert samples["gen_ai_server_time_to_first_token_seconds_count", guide] == 2
    assert samples["gen_ai_server_time_per_output_token_seconds_sum", guide] == 0.5 / 2
    assert samples["swarmllm_prompt_tokens_total", guide] == 14
    assert samples["swarmllm_generated_tokens_total", guide] == 4


@pytest.mark.slow
async def test_the_nodes_own_state_is_read_at_each_scrape(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        before = await scrape(stand)
        await stand.tell_of_peer("node-b", "big", 4, ((0, 4),))
        after = await scrape(stand)
    assert before["swarmllm_peers_connected", ()] == 0
    assert after["swarmllm_peers_connected", ()] == 1
    assert after["swarmllm_ready", ()] == 1
    assert after["swarmllm_info", (version("llama-cpp-python"), platform.python_version(), __version__)] == 1
    assert ("swarmllm_peer_sent_bytes_total", (NODE_B,)) in after


async def test_what_workers_use_is_counted_by_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve_node(tmp_path) as stand:
        own = WorkerStatistics("ab" * 32, os.getpid(), (), 0, 0, 0, 0, 0, 1, "")
        gone = WorkerStatistics("cd" * 32, None, (), 0, 0, 0, 0, 0, 1, "")
        monkeypatch.setattr(stand.pool, "statistics", lambda: (own, gone))
        samples = await scrape(stand)
    assert samples["swarmllm_worker_cpu_seconds_total", (own.model_id,)] > 0
    assert samples["swarmllm_worker_resident_memory_bytes", (own.model_id,)] > 2**20
    assert samples["swarmllm_worker_open_fds", (own.model_id,)] > 3
    assert not any(gone.model_id in labels and "open_fds" in name for name, labels in samples)


@pytest.mark.slow
async def test_a_scrape_says_which_models_are_complete_and_what_the_others_lack(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        guide = (await stand.node.models.get("guide")).model_id
        held = ShardAnnounce(model_id=guide, name="guide", n_layers=12, ranges=((3, 5), (4, 12)))
        record = encode_record(NodeRecord(node_id=NODE_B, models=(held,)))
        nobody = await scrape(stand)
        await stand.network.add(NODE_B).publish(record)
        with trio.fail_after(DEADLINE_S):
            while NODE_B not in stand.registry.held(guide):
                await trio.lowlevel.checkpoint()
        partly = await scrape(stand)
        loaded = await stand.http.post("/api/admin/models/guide/load", json={"layers": "0:3"})
        assert loaded.status_code == 200, loaded.text
        whole = await scrape(stand)
    complete, missing = "swarmllm_model_complete", "swarmllm_model_missing_layers"
    label = ("guide",)
    assert (nobody[complete, label], nobody[missing, label]) == (0, 12)
    assert (partly[complete, label], partly[missing, label]) == (0, 3)
    assert (whole[complete, label], whole[missing, label]) == (1, 0)


async def test_the_page_says_what_a_scrape_has(tmp_path: Path) -> None:
    assert PAGE.read_text() == reference(), "write metric_definitions.reference() to docs/metrics.md"
    async with serve_node(tmp_path) as stand:
        text = (await stand.http.get("/metrics")).text
    seen = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    of_a_dht = {DHT_NODES.name, DHT_RECORDS.name}
    of_others = {item.name for item in OF_BOOTSTRAP_NODES}
    assert seen == {item.name for item in DEFINITIONS} - of_a_dht - of_others, "there is no DHT in memory"
    assert {item.name for item in DEFINITIONS if item.kind == "counter"} == {
        item.name for item in DEFINITIONS if item.name.endswith("_total")
    }


async def test_server_timing_says_what_is_known_when_the_headers_leave(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        whole = await stand.http.post(CHAT, json=HELLO)
        streamed = await stand.http.post(CHAT, json=HELLO | {"stream": True})
    steps = dict(step.split(";dur=") for step in whole.headers["server-timing"].split(", "))
    assert list(steps) == ["queue", "tokenize", "prefill", "decode", "network"]
    assert (float(steps["tokenize"]), float(steps["prefill"]), float(steps["decode"])) == (1.0, 10.0, 500.0)
    assert streamed.headers["server-timing"].count("dur=") in (3, 5)
