"""Two daemons: what one keeps of a prompt the other hears of, if the first one's user wants that."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import PATIENCE_S

PROMPT = "A swarm of nodes runs a model that none of them could hold alone. " * 4


def ask(node: DaemonProcess) -> None:
    body = {"model": "guide", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    assert node.http.post("/v1/completions", json=body).status_code == 200


def announced(seer: DaemonProcess) -> dict[str, int]:
    peers = seer.http.get("/api/admin/peers").json()["peers"]
    return {peer["nickname"]: peer["announced_prefixes"] for peer in peers}


@pytest.mark.slow
def test_a_peer_hears_of_a_kept_prompt_from_whoever_wants_it_told(tmp_path: Path) -> None:
    sharing = {"n_threads": 1, "n_ctx": 512, "share_prefix_cache_with_peers": True}
    silent = {"n_threads": 1, "n_ctx": 512}
    with (
        running_daemon(tmp_path, "silent", load=["guide"], inference=silent) as a,
        running_daemon(tmp_path, "open", load=["guide"], inference=sharing, bootstrap=a.addresses) as b,
        running_daemon(tmp_path, "seer", load=[], bootstrap=[*a.addresses, *b.addresses]) as seer,
    ):
        wait_for(lambda: announced(seer) == {"silent": 0, "open": 0}, PATIENCE_S, "both records")
        ask(a)
        ask(b)
        wait_for(lambda: announced(seer)["open"] == 1, PATIENCE_S, "the announcement")
        assert announced(seer)["silent"] == 0
        wait_for(lambda: announced(a)["open"] == 1, PATIENCE_S, "the announcement at the other one")
        seen = seer.http.get("/api/admin/peers/open").json()
        assert seen["connected"]["announced_prefixes"] == 1
