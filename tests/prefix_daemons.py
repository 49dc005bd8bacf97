"""Real daemons that share the KV that they keep, and what they say of it, for tests."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess, running_daemon

from bench.common.shapes import Shape
from swarmllm.swarm.membership.network_key import NetworkFile, new_secret, private_network

PROMPT = "A swarm of nodes runs a model that none of them could hold alone. " * 90
NEAR_MS = 20
INFERENCE: dict[str, Any] = {"n_threads": 1, "n_ctx": 2048, "kernels": "ggml"}
"""With kernels of ours, a processor with AMX may compute sooner than it is given."""
SLOW = Shape(n_layers=12, n_embd=512, n_heads=8, n_kv_heads=2, n_ff=8192, n_vocab=512, context_length=8192)
N_SLOW_PROMPT = 1200


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
    """What its metrics say of KV that travels, by the last word of the name and the labels but for the
    reason."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in node.http.get("/metrics").text.splitlines():
        if line.startswith("swarmllm_prefix_"):
            name, _, value = line.rpartition(" ")
            name = re.sub(',reason="[a-z_]*"', "", name)
            found[name.removeprefix("swarmllm_prefix_")] += float(value)
    return dict(found)


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
