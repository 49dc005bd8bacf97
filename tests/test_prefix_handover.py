"""Real daemons: a node that takes layers over begins with the KV of the one that gives them up."""

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
from prefix_daemons import (
    N_SLOW_PROMPT,
    OUTCOMES,
    SLOW,
    TRIES,
    add_slow,
    announced,
    ask,
    counted,
    is_near,
    n_cached,
)

from bench.common.shapes import build

pytestmark = pytest.mark.long

N_STREAM, N_MOVING = 3000, 600


@contextmanager
def cut_swarm(folder: Path) -> Iterator[Callable[[str, str], DaemonProcess]]:
    """Starts nodes of a swarm that share what they keep: by their names and the layers of a model that each
    has. A token of it is a byte."""
    path = build(SLOW, folder / "slow.gguf")
    sharing = {"n_threads": 1, "n_ctx": 8000, "n_slots": 2, "share_prefix_cache_with_peers": "on"}
    sharing["kernels"] = "ggml"  # with ours, a processor with AMX may compute sooner than it is given
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
            if was_too_busy(fetched):
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
    assert any(goes_on(tmp_path / str(i), how) for i in range(TRIES))


def goes_on(folder: Path, how: str) -> bool:
    """False: the machine was too busy for KV to be fetched."""
    folder.mkdir()
    with cut_swarm(folder) as start:
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
        text = "".join(choice["text"] for each in [*rest, last] for choice in each["choices"])
        again = ask(first, model="slow", ignore_eos=True, **fields)
        assert text == again["choices"][0]["text"]
        if was_too_busy(fetched):
            return False
        assert fetched['fetches_total{outcome="hit"}'] == 1, fetched
        assert fetched["fetched_tokens_total"] >= N_SLOW_PROMPT // 64 * 64
        return True


def was_too_busy(fetched: dict[str, float]) -> bool:
    """Nothing was fetched because it came too late, or would have."""
    if fetched['fetches_total{outcome="hit"}']:
        return False
    assert sum(fetched[f'fetches_total{{outcome="{outcome}"}}'] for outcome in OUTCOMES) > 0, fetched
    return True


def route(answer: dict[str, Any]) -> list[str]:
    return [stage["nickname"] for stage in answer["swarm"]["route"]]


def holders(node: DaemonProcess) -> set[str]:
    """Of the second half of the model, by nickname."""
    found = node.http.get("/api/admin/models/slow/status").json()["holders"]
    return {each["nickname"] for each in found if each["layers"] == ["6:12"]}


def is_complete(node: DaemonProcess, model: str) -> bool:
    return bool(node.http.get(f"/api/admin/models/{model}/status").json()["complete"])
