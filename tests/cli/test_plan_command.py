"""plan: the route of a request, and why not another."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import Result
from fake_node import FakeNode

from swarmllm.cli.client import EXIT_USAGE

Run = Callable[..., Result]


PLAN: dict[str, Any] = {
    "model": "guide",
    "prompt_tokens": 10,
    "output_tokens": 300,
    "cost_s": 1.25,
    "ends_s": 0.0005,
    "stages": [
        {
            "node_id": "12D3KooWSelf",
            "nickname": "kitchen",
            "layers": "0:8",
            "compute_s": 0.5,
            "network_s": 0.25,
            "measured": True,
            "standby": None,
            "alternatives": [
                {
                    "node_id": "12D3KooWBusy",
                    "nickname": "cellar",
                    "layers": "0:8",
                    "extra_s": 0.1,
                    "full": True,
                },
            ],
        },
        {
            "node_id": "12D3KooWPeer",
            "nickname": "attic\x1b[2J",
            "layers": "8:12",
            "compute_s": 0.25,
            "network_s": 0.25,
            "measured": False,
            "lacks": "no free slot",
            "standby": "12D3KooWAway",
            "alternatives": [
                {
                    "node_id": "12D3KooWAway",
                    "nickname": "shed",
                    "layers": "8:12",
                    "extra_s": 3.0,
                    "full": False,
                },
                {
                    "node_id": "12D3KooWLoft",
                    "nickname": "loft",
                    "layers": "6:12",
                    "extra_s": 4.0,
                    "full": False,
                },
            ],
        },
    ],
    "rivals": [
        {"name": "all at home", "cost_s": None, "stages": []},
        {
            "name": "fewest stages",
            "cost_s": 2.5,
            "stages": [{"node_id": "12D3KooWAway", "nickname": "shed", "layers": "0:12"}],
        },
    ],
}
PLAN_PATH = "/api/admin/plan?model=guide&prompt_tokens=10&output_tokens=300"


def test_plan_shows_the_route_and_why_not_another(run: Run, node: FakeNode) -> None:
    node.on("GET", PLAN_PATH, PLAN)
    result = run("plan", "guide", "--prompt-tokens", "10", "--output-tokens", "300")
    head, _, first, second, ends, home, fewest, may = result.output.splitlines()
    assert head == "guide, 10 + 300 tokens: 1.2 s expected"
    for expected in ("kitchen", "0:8", "500.0 ms", "250.0 ms", "measured", "cellar is full"):
        assert expected in first
    for expected in ("attic\\x1b[2J", "8:12", "estimate", "shed", "shed +3.0 s", "loft with 6:12 +4.0 s"):
        assert expected in second
    assert "0.5 ms" in ends
    assert home == "all at home: not possible, layers are missing or cut elsewhere"
    assert fewest == "fewest stages: 2.5 s (0:12@shed)"
    assert may == "may be refused: 8:12@attic\\x1b[2J, no free slot"


def test_plan_says_where_the_text_would_not_be_exact(run: Run, node: FakeNode) -> None:
    for is_exact in (False, True):
        node.on("GET", PLAN_PATH, PLAN | {"exact": is_exact})
        result = run("plan", "guide", "--prompt-tokens", "10", "--output-tokens", "300")
        assert ("rounded between stages (q8_0)" in result.output) is not is_exact


def test_plan_for_programs_is_what_the_daemon_said(run: Run, node: FakeNode) -> None:
    node.on("GET", PLAN_PATH, PLAN)
    result = run("plan", "guide", "--prompt-tokens", "10", "--output-tokens", "300", "--json")
    assert json.loads(result.stdout) == PLAN


def test_a_plan_for_no_tokens_is_wrong_usage(run: Run, node: FakeNode) -> None:
    assert run("plan", "guide", "--output-tokens", "0").exit_code == EXIT_USAGE
    assert node.requests == []
