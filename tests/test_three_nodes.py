"""One prompt through three nodes: separate processes, real network on loopback, a third of the model each."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp
import openai
import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S

from swarmllm.guide import GUIDE_PATH

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is a pipeline?"}]
THIRDS = ("guide:0:4", "guide:4:8", "guide:8:12")
N_SLOTS = 3


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, ...]]:
    folder = tmp_path_factory.mktemp("three-nodes")
    tables = {"inference": {"n_threads": 1, "n_slots": N_SLOTS}, "node": {"log_level": "debug"}}
    with (
        running_daemon(folder, "a", load=[THIRDS[0]], **tables) as a,
        running_daemon(folder, "b", load=[THIRDS[1]], **tables, bootstrap=a.addresses) as b,
        running_daemon(folder, "c", load=[THIRDS[2]], **tables, bootstrap=a.addresses) as c,
    ):
        for node in (a, b, c):
            wait_for(lambda node=node: complete(node), DEADLINE_S, "every node to know holders of all layers")
        yield a, b, c
        assert [node.stop() for node in (a, b, c)] == [0, 0, 0]


def complete(node: DaemonProcess) -> bool:
    return bool(node.http.get("/api/admin/models/guide/status").json()["complete"])


def client(node: DaemonProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


def ask(node: DaemonProcess) -> str:
    with client(node) as ai:
        answer = ai.chat.completions.create(model="guide", messages=QUESTION, temperature=0, max_tokens=60)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 1
    return answer.choices[0].message.content or ""


def test_one_id_follows_a_request_to_the_log_of_the_last_worker(nodes: tuple[DaemonProcess, ...]) -> None:
    body = {"model": "guide", "messages": QUESTION, "max_tokens": 4}
    answer = nodes[0].http.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    request_id = answer.headers["x-request-id"]
    assert request_id.startswith("req_")
    for node in nodes:
        said = rf"worker \d+ says: DEBUG \S+ request {request_id} ended with [1-9]\d* rows"
        wait_for(
            lambda node=node, said=said: re.search(said, node.log.read_text()),
            DEADLINE_S,
            "its worker's line",
        )
    assert f"request {request_id} of guide has ended:" in nodes[0].log.read_text()
    for node in nodes[1:]:
        ended = f"request {request_id} of a (…{nodes[0].node_id[-8:]}) ended here"
        wait_for(lambda node=node, ended=ended: ended in node.log.read_text(), DEADLINE_S, "the stage's line")


@contextmanager
def streaming(node: DaemonProcess, n_tokens: int) -> Iterator[Iterator[Any]]:
    with (
        client(node) as ai,
        ai.chat.completions.create(
            model="guide",
            messages=QUESTION,
            temperature=0,
            max_tokens=n_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as stream,
    ):
        yield iter(stream)


def is_idle(node: DaemonProcess) -> bool:
    stats = node.stats()
    pipelines = stats["pipelines"]
    return (
        stats["requests"]["active"] == 0
        and pipelines["active_generations"] == 0
        and pipelines["active_stage_requests"] == 0
    )


def test_the_text_is_that_of_the_uncut_model(nodes: tuple[DaemonProcess, ...]) -> None:
    uncut = llama_cpp.Llama(str(GUIDE_PATH), n_ctx=2048, n_threads=1, flash_attn=True, verbose=False)
    try:
        expected = uncut.create_chat_completion(QUESTION, temperature=0, max_tokens=60)  # type: ignore[arg-type]
    finally:
        uncut.close()
    assert ask(nodes[0]) == expected["choices"][0]["message"]["content"]  # type: ignore[index]


def test_the_answer_names_every_stage(nodes: tuple[DaemonProcess, ...]) -> None:
    with client(nodes[0]) as ai:
        raw = ai.chat.completions.with_raw_response.create(model="guide", messages=QUESTION, max_tokens=5)
    route = raw.parse().model_extra["swarm"]["route"]
    assert [(stage["node"], stage["nickname"], stage["layers"]) for stage in route] == [
        (nodes[0].node_id, "a", "0:4"),
        (nodes[1].node_id, "b", "4:8"),
        (nodes[2].node_id, "c", "8:12"),
    ]
    assert raw.headers["x-swarm-nodes"] == "3"
    assert raw.headers["x-swarm-route"].startswith("chain 0:4@")


def test_a_cut_model_embeds_from_every_node(nodes: tuple[DaemonProcess, ...]) -> None:
    vectors = []
    for node in nodes:
        with client(node) as ai:
            raw = ai.embeddings.with_raw_response.create(model="guide", input="What is a pipeline?")
        assert raw.headers["x-swarm-nodes"] == "3"
        vectors.append(raw.parse().data[0].embedding)
    assert vectors[0] == vectors[1] == vectors[2]


@pytest.mark.parametrize("origin", [0, 2], ids=["first stage", "last stage"])
def test_the_stop_sequence_that_ended_a_message_is_told(
    nodes: tuple[DaemonProcess, ...], origin: int
) -> None:
    text = ask(nodes[0])
    stop = text[len(text) // 2 :][:6]
    body = {"model": "guide", "messages": QUESTION, "temperature": 0, "max_tokens": 60}
    said = nodes[origin].http.post("/v1/messages", json=body | {"stop_sequences": ["\0", stop]}).json()
    assert said["content"][0]["text"] == text[: text.index(stop)]
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", stop)


def test_after_the_prompt_workers_speak_to_each_other_directly(nodes: tuple[DaemonProcess, ...]) -> None:
    ask(nodes[0])  # Whoever is first opens the links, and may be done before they are.
    before = [node.stats()["pipelines"]["jobs_by_link"] for node in nodes]
    with client(nodes[0]) as ai:
        answer = ai.chat.completions.create(
            model="guide",
            messages=QUESTION,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=50,
            extra_body={"ignore_eos": True},
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 50
    # Guesses that were right saved a trip each.
    n_jobs = 48 - (answer.usage.completion_tokens_details.accepted_prediction_tokens or 0)
    assert n_jobs > 1
    for node, known in zip(nodes, before, strict=True):
        wait_for(
            lambda node=node, known=known: node.stats()["pipelines"]["jobs_by_link"] >= known + n_jobs,
            DEADLINE_S,
            "the node to have run decode jobs that came by links",
        )


def test_a_long_question_again_begins_after_what_every_node_has(nodes: tuple[DaemonProcess, ...]) -> None:
    """And so do further answers to it, which are computed at the same time."""
    question = "What is a layer range? " * 12

    def answer(n: int) -> Any:
        with client(nodes[0]) as ai:
            return ai.chat.completions.create(
                model="guide",
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=8,
                n=n,
            )

    first, again, several = answer(1), answer(1), answer(3)
    texts = [[choice.message.content for choice in each.choices] for each in (first, again, several)]
    assert texts == [texts[0], texts[0], texts[0] * 3]
    n_cached = [each.usage.prompt_tokens_details.cached_tokens for each in (first, again, several)]
    assert n_cached[0] == 0
    assert n_cached[1] == n_cached[2] == (first.usage.prompt_tokens - 1) // 64 * 64 > 0
    assert several.usage.prompt_tokens == first.usage.prompt_tokens


BLAME = {"flooded", "damaged", "broke protocol", "bad numbers", "bad request", "too slow"}
WATCHED_S = 8.0
"""A few heartbeats, record exchanges and rounds of the mesh's upkeep."""


def test_a_stage_shows_what_it_computes_and_for_whom(nodes: tuple[DaemonProcess, ...]) -> None:
    def tokens(node: DaemonProcess) -> dict[tuple[str, ...], int]:
        return {
            (each["name"], each["nickname"], *each["layers"]): each["tokens"]
            for each in node.stats()["serving"]
        }

    before = [tokens(node) for node in nodes]
    n_tokens = 50
    with streaming(nodes[0], n_tokens) as chunks:
        list(chunks)
    for index, layers in ((1, "4:8"), (2, "8:12")):
        key = ("guide", "a", layers)
        # Links tell what they did a little later, and guesses count as well.
        wait_for(
            lambda index=index, key=key: (
                tokens(nodes[index])[key] - before[index].get(key, 0) >= n_tokens - 1
            ),
            DEADLINE_S,
            "the stage to count its tokens",
        )
        page = nodes[index].http.get("/metrics").text
        assert re.search(r'swarmllm_served_tokens_total{model="guide"} [1-9]', page)
        assert f'swarmllm_served_requests_active{{model="guide",peer="{nodes[0].node_id}"}} ' in page
    assert all(key[1] != "a" for key in tokens(nodes[0])), "its own requests are not for others"


def test_honest_nodes_hold_nothing_against_each_other(nodes: tuple[DaemonProcess, ...]) -> None:
    for node in nodes:
        ask(node)
    until_s = time.monotonic() + WATCHED_S
    wait_for(lambda: time.monotonic() >= until_s, DEADLINE_S, "the time to be over")
    for node in nodes:
        for other in nodes:
            if other is not node:
                told = node.http.get(f"/api/admin/peers/{other.node_id}").json()["trust"]
                assert not BLAME & told["counts"].keys(), told


def test_every_node_can_be_the_origin(nodes: tuple[DaemonProcess, ...]) -> None:
    assert len({ask(node) for node in nodes}) == 1


def test_peers_see_each_other_and_what_they_hold(nodes: tuple[DaemonProcess, ...]) -> None:
    for node, layers in zip(nodes, ("0:4", "4:8", "8:12"), strict=True):
        for other in nodes:
            if other is not node:
                peers = {peer["node_id"]: peer for peer in other.http.get("/api/admin/peers").json()["peers"]}
                assert peers[node.node_id]["models"][0]["layers"] == [layers]


def test_closing_a_stream_frees_its_slot_on_every_node(nodes: tuple[DaemonProcess, ...]) -> None:
    """More often than there are slots: one that was kept would be missed."""
    for _ in range(N_SLOTS + 1):
        with streaming(nodes[0], 1500) as stream:
            for _ in range(5):
                next(stream)
            assert nodes[1].stats()["pipelines"]["active_stage_requests"] == 1
        for node in nodes:
            wait_for(lambda node=node: is_idle(node), DEADLINE_S, "the node to be idle after the client left")
    assert nodes[0].stats()["requests"]["cancelled"] >= N_SLOTS + 1
    assert ask(nodes[0])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_stream_survives_a_killed_worker(nodes: tuple[DaemonProcess, ...], which: int) -> None:
    undisturbed, (pid,) = stream_text(nodes[0]), nodes[which].worker_pids()
    n_before = nodes[0].stats()["pipelines"]["recoveries"]
    assert stream_text(nodes[0], after=(2, lambda: os.kill(pid, signal.SIGKILL))) == undisturbed
    assert nodes[which].worker_pids() != [pid]
    assert nodes[0].stats()["pipelines"]["recoveries"] > n_before


def stream_text(node: DaemonProcess, after: tuple[int, Callable[[], None]] | None = None) -> str:
    """`after` (n, act): act once n words have come; a piece may be several."""
    texts: list[str] = []
    with streaming(node, 200) as stream:
        for chunk in stream:
            texts += [choice.delta.content or "" for choice in chunk.choices]
            if after is not None and len("".join(texts).split()) >= after[0]:
                after[1]()
                after = None
    return "".join(texts)
