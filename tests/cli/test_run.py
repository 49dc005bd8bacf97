"""`swarmllm run`: what goes in, and that nothing but the answer comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fake_node import FakeNode, sse
from picture_files import data_url, jpeg, png

from swarmllm.cli import client

CHAT = "/v1/chat/completions"


def answer(node: FakeNode, *texts: str, finish_reason: str = "stop") -> None:
    chunks: list[Any] = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    chunks.append({"choices": [{"delta": {}, "finish_reason": finish_reason}], "swarm": {"route": []}})
    chunks.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    node.on("POST", CHAT, sse(*chunks, b"[DONE]"))


@pytest.fixture(autouse=True)
def models(node: FakeNode) -> None:
    node.on("GET", "/v1/models", {"data": [{"id": "guide"}]})


def test_the_answer_is_all_that_goes_to_stdout(run: Callable[..., Result], node: FakeNode) -> None:
    answer(node, "2,\t", "3, \x1b[1m5")
    result = run("run", "Name", "three primes", "--seed", "1", "--stop", "x", "--stop", "y", "--system", "Hi")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "2,\t3, \x1b[1m5\n", "")
    (body,) = node.bodies(CHAT)
    assert body["messages"] == [
        {"role": "system", "content": "Hi"},
        {"role": "user", "content": "Name three primes"},
    ]
    assert (body["seed"], body["stop"], "temperature" in body) == (1, ["x", "y"], False)


@pytest.mark.parametrize("arguments", [["Say it:"], ["Say it:", "-"]])
def test_what_is_piped_in_follows_the_prompt(
    run: Callable[..., Result], node: FakeNode, arguments: list[str]
) -> None:
    answer(node, "done\n")
    result = run("run", *arguments, stdin="a\nb\n")
    assert result.stdout == "done\n"
    assert node.bodies(CHAT)[0]["messages"] == [{"role": "user", "content": "Say it:\n\na\nb"}]


def test_no_prompt_is_wrong_usage(run: Callable[..., Result]) -> None:
    for arguments in (["run"], ["run", "-"], ["run", "  "]):
        assert run(*arguments).exit_code == client.EXIT_USAGE


def test_a_cut_off_answer_is_said_on_stderr(run: Callable[..., Result], node: FakeNode) -> None:
    answer(node, "and so", finish_reason="length")
    result = run("run", "Go on")
    assert result.stdout == "and so\n"
    assert "cut off" in result.stderr


def test_json_holds_the_whole_answer(run: Callable[..., Result], node: FakeNode) -> None:
    answer(node, "4", "2")
    assert "42" in json.loads(run("run", "6 x 7", "--json").stdout).values()


def test_an_answer_that_breaks_off_is_a_failure(run: Callable[..., Result], node: FakeNode) -> None:
    node.on("POST", CHAT, sse({"choices": [{"delta": {"content": "half"}}]}))
    result = run("run", "hello")
    assert result.exit_code == client.EXIT_FAILED
    assert "broke off" in result.stderr


def test_pictures_are_sent_before_the_prompt(
    run: Callable[..., Result], node: FakeNode, tmp_path: Path
) -> None:
    answer(node, "A dot.")
    for name, data in (("a.png", png()), ("b.jpg", jpeg())):
        (tmp_path / name).write_bytes(data)
    assert run("run", "--image", f"{tmp_path}/a.png", "--image", f"{tmp_path}/b.jpg", "What?").exit_code == 0
    assert node.bodies(CHAT)[0]["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": data_url(png())}},
        {"type": "image_url", "image_url": {"url": data_url(jpeg(), "image/jpeg")}},
        {"type": "text", "text": "What?"},
    ]
    (tmp_path / "c.png").write_text("no picture")
    refused = run("run", "--image", f"{tmp_path}/c.png", "What?")
    assert refused.exit_code == client.EXIT_FAILED
    assert "c.png: this is none of PNG, JPEG, WebP and GIF" in refused.stderr
    assert len(node.bodies(CHAT)) == 1
