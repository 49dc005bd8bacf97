"""`swarmllm models pull`: what is asked of the node, and what a person is told."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner
from fake_node import FakeNode

from swarmllm.cli import pull as pull_module
from swarmllm.cli.main import main
from swarmllm.cli.pull import PATH, SEARCH_PATH, pace

SOURCE = "hf:org/repo:Q8_0"


def download(state: str, **fields: Any) -> dict[str, Any]:
    return {
        "id": "abc",
        "source": SOURCE,
        "layers": None,
        "state": state,
        "done_bytes": 50,
        "total_bytes": 250,
        "bytes_per_s": 100,
        "model": "",
        "projector": "",
        "projector_bytes": 0,
        "waits_for": "",
        "trouble": "",
        "error": "",
    } | fields


def pull(node: FakeNode, *arguments: str, **env: str | None) -> Any:
    variables = {"HF_TOKEN": None, "HF_ENDPOINT": None} | env
    command = ["models", "pull", SOURCE, *arguments, "--api", node.url]
    return CliRunner().invoke(main, command, env=variables)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module, "LOOK_EVERY_S", 0.0)


def test_it_looks_on_until_the_model_is_there(node: FakeNode) -> None:
    node.on("POST", PATH, download("waiting"))
    node.on("GET", f"{PATH}/abc", download("done", model="repo-q8_0"))
    result = pull(node, "--layers", "0:4")
    assert result.exit_code == 0, result.output
    assert result.stdout == "repo-q8_0: fetched. Load it: swarmllm models load repo-q8_0 --layers 0:4\n"
    assert node.bodies(PATH) == [
        {
            "source": SOURCE,
            "layers": "0:4",
            "name": None,
            "sha256": None,
            "mmproj": True,
            "hf_token": None,
            "hf_endpoint": None,
        }
    ]


def test_its_projector_is_named_with_its_size_before_it_comes(node: FakeNode) -> None:
    coming = download("fetching", projector="mmproj-f16.gguf", projector_bytes=850_000_000)
    node.on("POST", PATH, coming)
    node.on("GET", f"{PATH}/abc", coming | {"state": "done", "model": "x"})
    result = pull(node)
    assert "After it comes its projector mmproj-f16.gguf (850.0 MB); --no-mmproj leaves" in result.stderr
    assert "It takes pictures, with mmproj-f16.gguf." in result.stdout
    blind = {"state": "done", "model": "x", "projector": "", "error": "x takes no pictures: so"}
    node.on("GET", f"{PATH}/abc", coming | blind)
    result = pull(node, "--no-mmproj")
    assert result.exit_code == 0
    assert "x takes no pictures: so" in result.stderr
    assert [body["mmproj"] for body in node.bodies(PATH)] == [True, False]


def test_layers_that_wait_say_for_what(node: FakeNode) -> None:
    node.on("POST", PATH, download("done", model="x", waits_for="the hashes of layers 4:12, head"))
    result = pull(node, "--layers", "0:4")
    assert result.exit_code == 0, result.output
    assert "x: layers 0:4 are here, and wait for the hashes of layers 4:12, head." in result.stdout
    assert "swarmllm models show x" in result.stdout


def test_hugging_faces_variables_are_passed_on(node: FakeNode) -> None:
    node.on("POST", PATH, download("done", model="x"))
    pull(node, HF_TOKEN="hf_mine", HF_ENDPOINT="https://mirror.example")
    (body,) = node.bodies(PATH)
    assert (body["hf_token"], body["hf_endpoint"]) == ("hf_mine", "https://mirror.example")


@pytest.mark.parametrize(
    ("answer", "words"),
    [(download("failed", error="no such file"), "no such file"), (download("cancelled"), "goes on there")],
)
def test_what_did_not_work_is_said_and_the_exit_code_tells(
    node: FakeNode, answer: dict[str, Any], words: str
) -> None:
    node.on("POST", PATH, answer)
    result = pull(node)
    assert result.exit_code == 1
    assert words in result.stderr
    assert pull(node, "--json").exit_code == 1


def test_the_pace_is_rate_and_time_left() -> None:
    assert pace(download("fetching")) == "100 B/s, 2.0 s left"
    assert pace(download("fetching", bytes_per_s=0)) == ""
    assert pace(download("fetching", trouble="the server is busy")) == "the server is busy; trying again"


def pulls(node: FakeNode, *arguments: str) -> Any:
    return CliRunner().invoke(main, ["models", "pulls", *arguments, "--api", node.url])


def test_what_failed_is_shown_and_tried_again(node: FakeNode) -> None:
    broken = download("failed", error="no \x1b[31msuch file", bytes_per_s=0)
    node.on("GET", PATH, {"downloads": [broken, download("fetching", id="def", layers="0:4")]})
    node.on("POST", f"{PATH}/abc/retry", download("waiting", id="new"))
    result = pulls(node, "--retry", "abc")
    assert result.exit_code == 0, result.output
    assert "no \\x1b[31msuch file" in result.stdout
    assert "50 B of 250 B" in result.stdout
    assert f"{SOURCE} layers 0:4" in result.stdout
    assert ("POST", f"{PATH}/abc/retry", {}) in node.requests


def test_all_that_have_ended_are_cleared_and_no_others(node: FakeNode) -> None:
    states = ("waiting", "fetching", "checking", "done", "failed", "cancelled")
    node.on("GET", PATH, {"downloads": [download(state, id=state) for state in states]})
    for state in states:
        node.on("POST", f"{PATH}/{state}/clear", download(state))
    assert pulls(node, "--clear", "all", "--json").exit_code == 0
    assert [path for method, path, _ in node.requests if method == "POST"] == [
        f"{PATH}/{state}/clear" for state in ("done", "failed", "cancelled")
    ]
    assert pulls(node, "--clear", "failed", "--retry", "failed").exit_code == 2
    node.on("GET", PATH, {"downloads": []})
    assert pulls(node, "--clear", "failed").stdout == "No downloads.\n"


FOUND = {"source": "hf:o/r:x.gguf", "download_bytes": 4_100_000_000, "fits": True, "n_nodes": 3} | {
    "tokens_per_s": 9.04,
    "problem": "",
}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "4.1 GB  yes, over 3 nodes, about 9.0 tokens/s"),
        ({"n_nodes": 1, "tokens_per_s": 31.4}, "yes, on one node, about 31 tokens/s"),
        ({"fits": False, "problem": "it takes too much"}, "no: it takes too much"),
        ({"fits": None, "download_bytes": None, "problem": "no \x1b[31mfile"}, "not known: no \\x1b[31mfile"),
    ],
)
def test_search_says_what_fits(node: FakeNode, changes: dict[str, Any], shown: str) -> None:
    node.on("POST", SEARCH_PATH, {"models": [FOUND | changes]})
    env = {"HF_TOKEN": "t", "HF_ENDPOINT": None}
    result = CliRunner().invoke(main, ["models", "search", "big one", "--api", node.url], env=env)
    assert result.exit_code == 0, result.output
    assert "hf:o/r:x.gguf" in result.stdout
    assert shown in result.stdout
    assert node.bodies(SEARCH_PATH) == [{"term": "big one", "hf_token": "t", "hf_endpoint": None}]


def test_search_without_results_says_so(node: FakeNode) -> None:
    node.on("POST", SEARCH_PATH, {"models": []})
    result = CliRunner().invoke(main, ["models", "search", "nothing", "--api", node.url])
    assert (result.exit_code, result.stdout) == (0, "The hub has no model with GGUF files for 'nothing'.\n")
