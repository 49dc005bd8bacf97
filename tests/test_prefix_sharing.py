"""Real daemons: KV of a prompt that one node computed goes to another that is asked the same, if wanted."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S

from bench.common.shapes import Shape, build
from swarmllm.swarm.membership.network_key import NetworkFile, new_secret, private_network

pytestmark = pytest.mark.long

PROMPT = "A swarm of nodes runs a model that none of them could hold alone. " * 90
NEAR_MS = 20
INFERENCE = {"n_threads": 1, "n_ctx": 2048}
SLOW = Shape(n_layers=12, n_embd=512, n_heads=8, n_kv_heads=2, n_ff=8192, n_vocab=512, context_length=8192)
N_SLOW_PROMPT, N_STREAM, N_MOVING = 1200, 3000, 600


def ask(node: DaemonProcess, **fields: Any) -> dict[str, Any]:
    body = {"model": "guide", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
    response = node.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def n_cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def announced(seer: DaemonProcess) -> dict[str, int]:
    peers = seer.http.get("/api/admin/peers").json()["peers"]
    return {peer["nickname"]: peer["announced_prefixes"] for peer in peers}


def is_near(seer: DaemonProcess) -> bool:
    """As far as it has measured."""
    peers = seer.http.get("/api/admin/peers").json()["peers"]
    return all(peer["rtt_ms"] is not None and peer["rtt_ms"] < NEAR_MS for peer in peers)


def counted(node: DaemonProcess) -> dict[str, float]:
    """What its metrics say of KV that travels, by the last word of the name and the labels."""
    found = {}
    for line in node.http.get("/metrics").text.splitlines():
        if line.startswith("swarmllm_prefix_"):
            name, _, value = line.rpartition(" ")
            found[name.removeprefix("swarmllm_prefix_")] = float(value)
    return found


@contextmanager
def members(
    folder: Path, *names: str, last: dict[str, Any] | None = None, **inference: Any
) -> Iterator[list[DaemonProcess]]:
    """Of a private swarm; each knows those before it. `last`: settings of the last one alone."""
    network = private_network(new_secret())
    with ExitStack() as stack:
        nodes: list[DaemonProcess] = []
        for name in names:
            (folder / name).mkdir(mode=0o700)
            NetworkFile(folder / name).change(lambda known: network)
            bootstrap = [address for node in nodes for address in node.addresses]
            settings = INFERENCE | inference | (last or {} if name == names[-1] else {})
            nodes.append(
                stack.enter_context(
                    running_daemon(folder, name, load=[], inference=settings, bootstrap=bootstrap)
                )
            )
        yield nodes


def add_slow(node: DaemonProcess, path: Path, **fields: Any) -> None:
    for url, body in (("", {"path": str(path)}), ("/slow/load", fields)):
        answer = node.http.post(f"/api/admin/models{url}", json=body)
        assert '"error"' not in answer.text, answer.text


OUTCOMES = ("miss", "declined", "hit")
TRIES = 6
"""A busy machine may not bring the KV within a twentieth of the prompt's time."""


@pytest.mark.slow
def test_a_member_that_is_asked_the_same_takes_the_kv_of_the_one_that_computed_it(tmp_path: Path) -> None:
    path = build(SLOW, tmp_path / "slow.gguf")
    assert any(takes_it(tmp_path / str(i), path) for i in range(TRIES))


def takes_it(folder: Path, path: Path) -> bool:
    """False: the machine was too busy for it to be fetched."""
    folder.mkdir()
    # With this setting the other one gets no tokens, so what it knows of a prompt does not count there.
    with members(folder, "first", "second", local_embedding_privacy=True) as (first, second):
        add_slow(first, path)
        fields = {"model": "slow", "prompt": PROMPT[:N_SLOW_PROMPT], "ignore_eos": True}
        cold = ask(first, **fields)
        # Before, the first one might have had it computed here.
        add_slow(second, path)
        wait_for(lambda: announced(second).get("first", 0) > 0, DEADLINE_S, "the announcement")
        # A way that nobody has measured, or only once while the other node was starting, counts as long.
        wait_for(lambda: is_near(second), DEADLINE_S, "a short round trip")
        warm = ask(second, **fields)
        n_prompt = cold["usage"]["prompt_tokens"]
        whole = (n_prompt - 1) // 64 * 64
        assert n_cached(cold) == 0
        assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
        if n_cached(warm) < whole:
            assert sum(counted(second)[f'fetches_total{{outcome="{each}"}}'] for each in OUTCOMES) > 0
            return False
        prefix = warm["swarm"]["prefix"]
        assert (prefix["node"], prefix["tokens"]) == (first.node_id, whole)
        assert prefix["bytes"] > 0
        assert cold["swarm"]["prefix"] is None
        # A block and the last one are computed again; then it is the second one's to give.
        wait_for(lambda: counted(second)['checks_total{outcome="right"}'] == 1, DEADLINE_S, "the check")
        wait_for(lambda: announced(first)["second"] > 0, DEADLINE_S, "the second one's announcement")
        assert counted(second)['fetches_total{outcome="hit"}'] == 1
        assert counted(second)["fetched_bytes_total"] == counted(first)["given_bytes_total"] > 0
        # What is here is not fetched again, and exact requests take nothing from anybody.
        again = ask(second, **fields)
        assert n_cached(again) == n_prompt - 1
        assert again["swarm"]["prefix"] is None
        exact = ask(second, exact=True, **fields)
        assert n_cached(exact) == 0
        assert exact["swarm"]["prefix"] is None
    return True


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"kv_type": "q8_0"}, {"activation_compression": "q8_0"}])
def test_kv_of_another_format_comes_too_and_the_answer_says_so(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    path = build(SLOW, tmp_path / "slow.gguf")
    assert any(takes_other_format(tmp_path / str(i), path, settings) for i in range(TRIES))


def takes_other_format(folder: Path, path: Path, settings: dict[str, str]) -> bool:
    """False: the machine was too busy for it to be fetched."""
    folder.mkdir()
    with members(folder, "first", "second", last=settings, local_embedding_privacy=True) as (first, second):
        add_slow(first, path)
        fields = {"model": "slow", "prompt": PROMPT[:N_SLOW_PROMPT], "ignore_eos": True}
        cold = ask(first, **fields)
        assert cold["swarm"]["exact"]
        add_slow(second, path)
        wait_for(lambda: announced(second).get("first", 0) > 0, DEADLINE_S, "the announcement")
        wait_for(lambda: is_near(second), DEADLINE_S, "a short round trip")
        warm = ask(second, **fields)
        whole = (cold["usage"]["prompt_tokens"] - 1) // 64 * 64
        if n_cached(warm) < whole:
            assert sum(counted(second)[f'fetches_total{{outcome="{each}"}}'] for each in OUTCOMES) > 0
            return False
        prefix = warm["swarm"]["prefix"]
        assert (prefix["tokens"], prefix["other_format"]) == (whole, True)
        assert not warm["swarm"]["exact"]
        wait_for(lambda: counted(second)['checks_total{outcome="right"}'] == 1, DEADLINE_S, "the check")
        # It stays what it is, and is nobody else's.
        again = ask(second, **fields)
        assert n_cached(again) >= whole
        assert not again["swarm"]["exact"]
        assert again["swarm"]["prefix"] is None
        exact = ask(second, exact=True, **fields)
        assert n_cached(exact) == 0
        assert exact["swarm"]["exact"]
        assert announced(first).get("second", 0) == 0
    return True


@pytest.mark.slow
def test_in_an_open_swarm_prompts_are_announced_by_whoever_wants_it(tmp_path: Path) -> None:
    sharing = INFERENCE | {"share_prefix_cache_with_peers": "on"}
    with ExitStack() as stack:
        b = stack.enter_context(running_daemon(tmp_path, "open", load=["guide"], inference=sharing))
        # While it is alone: another node that is quicker would be given the prompt.
        ask(b)
        own = INFERENCE | {"local_embedding_privacy": True}
        joining = running_daemon(tmp_path, "silent", load=["guide"], inference=own, bootstrap=b.addresses)
        a = stack.enter_context(joining)
        known = [*a.addresses, *b.addresses]
        seer = stack.enter_context(running_daemon(tmp_path, "seer", load=[], bootstrap=known))
        wait_for(lambda: announced(seer).keys() == {"silent", "open"}, DEADLINE_S, "both records")
        wait_for(lambda: announced(seer)["open"] > 0, DEADLINE_S, "the announcement")
        wait_for(lambda: announced(a)["open"] > 0, DEADLINE_S, "the announcement at the other one")
        assert n_cached(ask(a)) == 0
        assert announced(seer)["silent"] == 0
        seen = seer.http.get("/api/admin/peers/open").json()
        assert seen["connected"]["announced_prefixes"] > 0


@contextmanager
def cut_swarm(folder: Path) -> Iterator[Callable[[str, str], DaemonProcess]]:
    """Starts nodes of a swarm that share what they keep: by their names and the layers of a model that each
    has. A token of it is a byte."""
    path = build(SLOW, folder / "slow.gguf")
    sharing = {"n_threads": 1, "n_ctx": 8000, "n_slots": 2, "share_prefix_cache_with_peers": "on"}
    with ExitStack() as stack:
        nodes: list[DaemonProcess] = []

        def start(name: str, layers: str) -> DaemonProcess:
            bootstrap = [address for each in nodes for address in each.addresses]
            settings = {"load": [], "inference": sharing, "bootstrap": bootstrap}
            node = running_daemon(folder, name, node={"drain_timeout_s": 600}, **settings)
            nodes.append(stack.enter_context(node))
            add_slow(nodes[-1], path, layers=layers)
            return nodes[-1]

        yield start


@contextmanager
def streaming(node: DaemonProcess, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """The chunks of an answer, the first of which has come."""
    body = {"model": "slow", "ignore_eos": True, "temperature": 0, "stream": True, **fields}

    def chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
        for line in lines:
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))

    with node.http.stream("POST", "/v1/completions", json=body) as stream:
        found = chunks(stream.iter_lines())
        first = next(found)
        yield chain([first], found)


def random_prompt(seed: int) -> str:
    return "".join(Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=N_SLOW_PROMPT))


@pytest.mark.slow
def test_a_node_that_takes_over_layers_begins_with_the_kv_of_the_one_that_leaves(tmp_path: Path) -> None:
    assert any(takes_over(tmp_path / str(i)) for i in range(TRIES))


def takes_over(folder: Path) -> bool:
    """The node that leaves finishes a stream, and gives its KV meanwhile. False: the machine was too busy for
    it to be fetched."""
    folder.mkdir()
    with cut_swarm(folder) as start:
        first, second = start("first", "0:6"), start("second", "6:12")
        wait_for(
            lambda: is_complete(first, "slow"), DEADLINE_S, "the first one to know holders of all layers"
        )
        fields = {"model": "slow", "prompt": random_prompt(5), "ignore_eos": True}
        cold = ask(first, **fields)
        assert route(cold) == ["first", "second"]
        # Exact requests use no KV of others, so they stay where they are.
        with streaming(first, prompt="a", max_tokens=N_STREAM, exact=True):
            third = start("third", "6:12")
            second.process.send_signal(signal.SIGTERM)
            wait_for(lambda: is_near(third), DEADLINE_S, "a short round trip")
            wait_for(lambda: holders(first) == {"third"}, DEADLINE_S, "the first one to plan without it")
            warm = ask(first, **fields)
            assert second.process.poll() is None
            assert route(warm) == ["first", "third"]
            assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
            fetched = counted(third)
            if not fetched['fetches_total{outcome="hit"}']:
                assert fetched['fetches_total{outcome="miss"}'] > 0, fetched
                return False
            assert fetched['fetches_total{outcome="hit"}'] == 1, fetched
            assert n_cached(warm) == fetched["fetched_tokens_total"] > 0
            assert fetched["fetched_bytes_total"] == counted(second)["given_bytes_total"] > 0
            # What no tokens are known of can be checked by nobody, and is told to nobody.
            assert announced(first).get("third", 0) == 0
            return True


@pytest.mark.slow
@pytest.mark.parametrize("how", ["it stops", "it unloads them"])
def test_a_stream_goes_on_with_the_kv_of_the_node_that_gives_up_its_layers(tmp_path: Path, how: str) -> None:
    with cut_swarm(tmp_path) as start:
        first, second = start("first", "0:6"), start("second", "6:12")
        wait_for(
            lambda: is_complete(first, "slow"), DEADLINE_S, "the first one to know holders of all layers"
        )
        fields = {"prompt": random_prompt(6), "max_tokens": N_MOVING}
        with streaming(first, **fields) as chunks:
            third = start("third", "6:12")
            wait_for(lambda: is_near(third), DEADLINE_S, "a short round trip")
            wait_for(lambda: holders(first) == {"second", "third"}, DEADLINE_S, "both to be known")
            if how == "it stops":
                second.process.send_signal(signal.SIGTERM)
                # Long before the stream ends, and long before it would have to.
                assert second.process.wait(DEADLINE_S) == 0
            else:
                answer = second.http.post("/api/admin/models/slow/unload", json={})
                assert answer.json()["loaded"] == []
            *rest, last = chunks
        swarm = next(each["swarm"] for each in [last, *reversed(rest)] if each.get("swarm"))
        assert [stage["nickname"] for stage in swarm["route"]] == ["first", "third"]
        assert (swarm["recoveries"], swarm["rebuilt"]) == (1, 1)
        fetched = counted(third)
        assert fetched['fetches_total{outcome="hit"}'] == 1, fetched
        assert fetched["fetched_tokens_total"] >= N_SLOW_PROMPT // 64 * 64
        text = "".join(choice["text"] for each in [*rest, last] for choice in each["choices"])
        again = ask(first, model="slow", ignore_eos=True, **fields)
        assert text == again["choices"][0]["text"]


def route(answer: dict[str, Any]) -> list[str]:
    return [stage["nickname"] for stage in answer["swarm"]["route"]]


def holders(node: DaemonProcess) -> set[str]:
    """Of the second half of the model, by nickname."""
    found = node.http.get("/api/admin/models/slow/status").json()["holders"]
    return {each["nickname"] for each in found if each["layers"] == ["6:12"]}


def is_complete(node: DaemonProcess, model: str) -> bool:
    return bool(node.http.get(f"/api/admin/models/{model}/status").json()["complete"])
