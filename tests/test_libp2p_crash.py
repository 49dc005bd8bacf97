"""libp2p falls over on every node under a running answer, and the answer does not notice."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S

pytestmark = pytest.mark.slow

CRASHING = (str(Path(__file__).with_name("crashing_daemon.py")),)
THIRDS = ("guide:0:4", "guide:4:8", "guide:8:12")
N_TOKENS = 120
RESTARTED = "task libp2p failed"


def events(node: DaemonProcess, after_some: Callable[[], None]) -> Iterator[dict[str, Any]]:
    body = {
        "model": "guide",
        "prompt": "What is a pipeline?",
        "max_tokens": N_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with node.http.stream("POST", "/v1/completions", json=body) as answer:
        # New requests need libp2p. Nobody has read a word of those that are refused.
        if answer.status_code == 503:
            return
        for number, line in enumerate(line for line in answer.iter_lines() if line.startswith("data: {")):
            if number == 2:
                after_some()
            yield json.loads(line.removeprefix("data: "))


def n_peers(node: DaemonProcess) -> int:
    return len(node.http.get("/api/admin/peers").json()["peers"])


def is_complete(node: DaemonProcess) -> bool:
    return bool(node.http.get("/api/admin/models/guide/status").json()["complete"])


def text_of(told: list[dict[str, Any]]) -> str:
    return "".join(choice.get("text") or "" for event in told for choice in event.get("choices", ()))


def test_an_answer_goes_on_while_libp2p_starts_again_on_every_node(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes: list[DaemonProcess] = []
        for name, layers in zip("abc", THIRDS, strict=True):
            bootstrap = nodes[0].addresses if nodes else []
            nodes.append(
                stack.enter_context(
                    running_daemon(tmp_path, name, load=[layers], bootstrap=bootstrap, program=CRASHING)
                )
            )
        a, b, _ = nodes
        wait_for(lambda: is_complete(a) and is_complete(b), DEADLINE_S, "all layers")
        undisturbed = list(events(a, lambda: None))

        def crash_all() -> None:
            for node in nodes:
                node.process.send_signal(signal.SIGUSR1)
            for node in nodes:
                wait_for(
                    lambda node=node: RESTARTED in node.log.read_text(), DEADLINE_S, "libp2p to fall over"
                )

        disturbed = list(events(a, crash_all))
        assert text_of(disturbed) == text_of(undisturbed) != ""
        assert not [event for event in disturbed if "error" in event]
        assert sum(event.get("swarm", {}).get("recoveries", 0) for event in disturbed) == 0
        assert [node.log.read_text().count(RESTARTED) for node in nodes] == [1, 1, 1]
        # Nobody was lost, and what needs libp2p works again.
        for node in nodes:
            wait_for(lambda node=node: n_peers(node) == 2, DEADLINE_S, "everybody to see the others")
        again = wait_for(lambda: text_of(list(events(b, lambda: None))), DEADLINE_S, "libp2p to be back")
        assert again == text_of(undisturbed)
