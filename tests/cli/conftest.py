from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result
from fake_node import CHAT_ANSWER, COMPLETIONS, FakeNode, running_fake_node

from swarmllm.cli.main import main


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with running_fake_node() as node:
        yield node


@pytest.fixture
def run(node: FakeNode) -> Callable[..., Result]:
    """Run `swarmllm ARGUMENTS` against the fake node."""

    def invoke(*arguments: str, stdin: str = "") -> Result:
        return CliRunner().invoke(
            main, arguments, env={"SWARMLLM_API": node.url, "COLUMNS": "160"}, input=stdin
        )

    return invoke


@pytest.fixture
def answering(node: FakeNode) -> FakeNode:
    """Two models, and the same answer to every question."""
    node.on("GET", "/v1/models", {"data": [{"id": "guide"}, {"id": "other"}]})
    node.on("POST", COMPLETIONS, CHAT_ANSWER)
    return node
