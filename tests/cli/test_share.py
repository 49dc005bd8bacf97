"""`swarmllm share` and `unshare`: what is asked of the node, and what a person is shown and asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fake_node import FakeNode, ndjson

from swarmllm.cli import share as share_module
from swarmllm.cli.share import PATH, doing_text

Run = Callable[..., Result]
MODEL_ID = "ab" * 32
HERE = {"node_id": "12D3KooWhere", "nickname": "kitchen", "is_self": True}
THERE = {"node_id": "12D3KooWthere", "nickname": "attic", "is_self": False}
PLAN: dict[str, Any] = {
    "model": "guide",
    "model_id": MODEL_ID,
    "size_bytes": 8_000_000,
    "complete": True,
    "problem": "",
    "parts": [
        HERE | {"layers": ["0:6"], "size_bytes": 4_000_000, "fetch_bytes": 0, "room_bytes": 5_000_000},
        THERE | {"layers": ["6:12"], "size_bytes": 4_000_000, "fetch_bytes": 4_000_000, "room_bytes": 9e6},
    ],
    "tokens_per_s": 12.34,
    "transfer_s": 3.0,
    "transfer_measured": False,
    "refusing": [THERE | {"nickname": "\x1b[31mgarage"}],
}


def view(n_ready: int) -> dict[str, Any]:
    return {
        "model": "guide",
        "model_id": MODEL_ID,
        "n_layers": 12,
        "n_ready": n_ready,
        "complete": n_ready == 12,
        "own": True,
        "shared_by": [HERE],
        "state": "",
        "arrived_bytes": 0,
        "total_bytes": 0,
        "members": [HERE | {"layers": ["0:6"], "loading": []}, THERE | {"layers": ["6:12"], "loading": []}],
    }


@pytest.fixture
def ready(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    monkeypatch.setattr(share_module, "LOOK_EVERY_S", 0.0)
    node.on("GET", f"{PATH}/guide/plan", PLAN)
    node.on("POST", PATH, view(6))
    node.on("GET", f"{PATH}/{MODEL_ID}", view(12))
    return node


def test_it_shows_the_plan_and_looks_on_until_every_layer_is_held(ready: FakeNode, run: Run) -> None:
    result = run("share", "guide", "--yes")
    assert result.exit_code == 0, result.output
    for shown in ("kitchen", "6:12", "12.3 tokens/s", "3.0 s, if the lines carry 1 Gbit/s", "complete"):
        assert shown in result.stdout
    assert "garage does not accept" in result.stdout
    assert "\x1b[31m" not in result.stdout
    assert ready.bodies(PATH) == [{"model": MODEL_ID}]


def test_of_what_each_node_fetches_for_itself_it_looks_on_by_name_until_the_id_is_known(
    ready: FakeNode, run: Run
) -> None:
    ready.on("POST", f"{PATH}/plan", PLAN | {"spread": True, "cuts_known": True, "download_bytes": 4_000_000})
    unknown = view(0) | {"model": "big", "model_id": "", "problem": ""}
    ready.on("POST", f"{PATH}/published", unknown)
    ready.on("GET", f"{PATH}/big", view(6) | {"model": "big"})
    ready.on("GET", f"{PATH}/{MODEL_ID}", view(12) | {"model": "big"})
    result = run("share", "hf:org/repo:Q8_0", "--name", "big", "--yes")
    assert result.exit_code == 0, result.output
    assert "each node fetches its layers from its hub: 4.0 MB here" in result.stdout
    assert "big: complete." in result.stdout
    (asked,) = ready.bodies(f"{PATH}/published")
    assert (asked["source"], asked["name"]) == ("hf:org/repo:Q8_0", "big")
    assert ready.bodies(PATH) == []


def test_a_share_that_cannot_go_on_ends_the_command(ready: FakeNode, run: Run) -> None:
    ready.on("POST", f"{PATH}/plan", PLAN | {"spread": True, "cuts_known": True, "download_bytes": 4_000_000})
    ready.on("POST", f"{PATH}/published", view(0) | {"model_id": "", "problem": "nobody can fetch the rest"})
    result = run("share", "hf:org/repo:Q8_0", "--yes")
    assert result.exit_code != 0
    assert "nobody can fetch the rest" in result.output


@pytest.mark.parametrize(("answer", "shared"), [("y\n", True), ("n\n", False), ("", False)])
def test_on_a_terminal_it_asks_once(
    ready: FakeNode, run: Run, monkeypatch: pytest.MonkeyPatch, answer: str, shared: bool
) -> None:
    monkeypatch.setattr(share_module, "can_ask", lambda: True)
    result = run("share", "guide", stdin=answer)
    assert (result.exit_code == 0) == shared
    assert bool(ready.bodies(PATH)) == shared


def test_where_nobody_can_be_asked_it_wants_yes_and_does_nothing(ready: FakeNode, run: Run) -> None:
    result = run("share", "guide")
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert ready.requests == []


@pytest.mark.parametrize("model", ["models/none.gguf", "./none.gguf", "org/repo"])
def test_a_file_that_is_not_there_is_named_and_nothing_is_asked_of_the_node(
    ready: FakeNode, run: Run, model: str
) -> None:
    result = run("share", model, "--yes")
    assert result.exit_code == 2
    assert f"There is no file {model}." in result.stderr
    assert ready.requests == []


@pytest.mark.parametrize("command", [("unshare",), ("models", "show"), ("models", "load"), ("peers", "show")])
@pytest.mark.parametrize("name", ["org/repo", ""])
def test_what_cannot_be_a_name_is_said_to_be_none(
    ready: FakeNode, run: Run, command: tuple[str, ...], name: str
) -> None:
    result = run(*command, name)
    assert result.exit_code == 4, result.output
    assert f"There is nothing called {name!r}" in result.stderr
    assert ready.requests == []


def test_of_a_model_without_room_it_does_not_say_who_would_fetch_what(ready: FakeNode, run: Run) -> None:
    said = {"spread": False, "cuts_known": True, "download_bytes": 4_000_000, "model": "big"}
    ready.on("POST", f"{PATH}/plan", PLAN | said | {"problem": "big takes too much."})
    result = run("share", "hf:org/repo:Q8_0", "--name", "big", "--yes")
    assert result.exit_code == 1
    assert "big takes too much." in result.stderr
    assert "fetches" not in result.stdout
    (asked,) = ready.bodies(f"{PATH}/plan")
    assert asked["name"] == "big"


def test_a_plan_without_room_is_explained_and_nothing_is_shared(ready: FakeNode, run: Run) -> None:
    ready.on("GET", f"{PATH}/guide/plan", PLAN | {"problem": "guide takes too much.", "tokens_per_s": None})
    result = run("share", "guide", "--yes")
    assert result.exit_code == 1
    assert "guide takes too much." in result.stderr
    assert ready.bodies(PATH) == []


def test_the_progress_says_how_much_has_come_to_every_member() -> None:
    fetches = THERE | {
        "layers": [],
        "loading": ["6:12"],
        "arrived_bytes": 1_500_000,
        "total_bytes": 4_000_000,
    }
    loads = HERE | {"layers": [], "loading": ["0:6"], "arrived_bytes": 0, "total_bytes": 0}
    holds = {**fetches, "nickname": "\x1b[31mgarage", "layers": ["0:6"], "loading": []}
    text = doing_text(view(0) | {"members": [loads, fetches, holds]})
    assert text == "kitchen loads 0:6; attic fetches 6:12, 1.5 MB of 4.0 MB"
    assert doing_text(view(0) | {"members": [], "state": "about to move"}) == "about to move"


def test_a_file_is_added_first_under_its_name(ready: FakeNode, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.touch()
    ready.on("POST", "/api/admin/models", ndjson({"type": "result", "model": {"name": "guide"}}))
    assert run("share", str(path), "--name", "guide", "--yes").exit_code == 0
    assert ready.bodies("/api/admin/models") == [{"path": str(path), "name": "guide"}]


PUBLISHED = {key: PLAN[key] for key in PLAN if key != "model_id"} | {
    "download_bytes": 9_900_000,
    "cuts_known": True,
}
DOWNLOADS = "/api/admin/downloads"
FILE = "hf:org/repo:big-Q8_0.gguf"


def web(ready: FakeNode, **plan: Any) -> None:
    ready.on("POST", f"{PATH}/plan", PUBLISHED | plan)
    done = {"id": "x", "state": "done", "model": "guide", "error": "", "published": FILE}
    ready.on("POST", DOWNLOADS, done)


def test_a_model_from_the_web_is_planned_and_then_fetched(ready: FakeNode, run: Run) -> None:
    web(ready)
    result = run("share", "hf:org/repo:Q8_0", "--yes")
    assert result.exit_code == 0
    assert "fetches all of it first: 9.9 MB" in result.stdout
    assert result.stdout.count("6:12") == 2, "the plan, and what came of it"
    assert ready.bodies(f"{PATH}/plan")[0]["source"] == "hf:org/repo:Q8_0"
    assert ready.bodies(DOWNLOADS)[0]["source"] == "hf:org/repo:Q8_0"
    assert ready.bodies(PATH) == [{"model": MODEL_ID, "source": FILE}]


@pytest.mark.parametrize("answer", ["n\n", ""])
def test_nothing_is_fetched_that_is_not_agreed_to(
    ready: FakeNode, run: Run, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(share_module, "can_ask", lambda: True)
    web(ready)
    result = run("share", "hf:org/repo:Q8_0", stdin=answer)
    assert result.exit_code == 1
    assert "12.3 tokens/s" in result.stdout
    assert ready.bodies(DOWNLOADS) == ready.bodies(PATH) == []


@pytest.mark.parametrize("cuts_known", [True, False])
def test_a_model_that_has_no_room_is_fetched_only_if_cutting_it_may_help(
    ready: FakeNode, run: Run, cuts_known: bool
) -> None:
    web(ready, problem="guide takes too much.", cuts_known=cuts_known)
    result = run("share", "hf:org/repo:Q8_0", "--yes")
    assert (result.exit_code, bool(ready.bodies(DOWNLOADS))) == ((1, False) if cuts_known else (0, True))


def test_a_name_is_not_given_to_a_model_that_has_one(ready: FakeNode, run: Run) -> None:
    result = run("share", "guide", "--name", "other", "--yes")
    assert result.exit_code == 2
    assert ready.requests == []


def test_unshare_says_what_happens(ready: FakeNode, run: Run) -> None:
    ready.on("DELETE", f"{PATH}/guide", view(12))
    result = run("unshare", "guide")
    assert result.exit_code == 0
    assert "not shared any more" in result.stdout
