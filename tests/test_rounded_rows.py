"""Two daemons whose rows go to each other as q8_0, by links: the answer says so, whoever is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S

from swarmllm.swarm.peers.trust import TrustEvent

N_TOKENS = 60
BLAME = (
    TrustEvent.WRONG_RESULT,
    TrustEvent.DISPUTED,
    TrustEvent.BROKE_PROTOCOL,
    TrustEvent.BAD_NUMBERS,
    TrustEvent.DAMAGED,
)


def answer(node: DaemonProcess) -> dict[str, Any]:
    body = {"model": "guide", "prompt": "What is a pipeline?", "max_tokens": N_TOKENS, "temperature": 0}
    told = node.http.post("/v1/completions", json=body | {"ignore_eos": True})
    assert told.status_code == 200, told.text
    return dict(told.json())


def is_complete(node: DaemonProcess) -> bool:
    return bool(node.http.get("/api/admin/plan?model=guide").status_code == 200)


@pytest.mark.slow
def test_the_node_that_is_asked_decides_whether_rows_are_rounded(tmp_path: Path) -> None:
    common = {"n_threads": 1, "n_ctx": 512, "check_rate": 1.0}
    rounding = common | {"activation_compression": "q8_0"}
    with (
        running_daemon(tmp_path, "exact", load=["guide:0:6"], inference=common) as exact,
        running_daemon(
            tmp_path, "rounding", load=["guide:6:12"], inference=rounding, bootstrap=exact.addresses
        ) as other,
    ):
        for node in (exact, other):
            wait_for(lambda node=node: is_complete(node), DEADLINE_S, "a pipeline")

        def plans() -> list[bool]:
            return [node.http.get("/api/admin/plan?model=guide").json()["exact"] for node in (exact, other)]

        wait_for(lambda: plans() == [True, False], DEADLINE_S, "what the other one can read")
        for node in (exact, other):
            told = [answer(node) for _ in range(2)]
            assert [each["swarm"]["exact"] for each in told] == [node is exact] * 2
            assert told[0]["usage"]["completion_tokens"] == N_TOKENS
            assert told[0]["choices"][0]["text"] == told[1]["choices"][0]["text"]
        assert all(node.stats()["pipelines"]["jobs_by_link"] for node in (exact, other))
        for node, seen in ((exact, other), (other, exact)):
            counts = node.http.get(f"/api/admin/peers/{seen.node_id}").json()["trust"]["counts"]
            assert not {event.value for event in BLAME} & counts.keys()
