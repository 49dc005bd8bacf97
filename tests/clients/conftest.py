"""A real daemon with the whole guide model, for clients that others made; one for each module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("client")
    with running_daemon(folder, "solo", load=["guide"], inference={"n_threads": 1, "n_ctx": 2048}) as node:
        wait_for(
            lambda: node.http.get("/health/ready").status_code == 200, DEADLINE_S, "the guide to be loaded"
        )
        yield node


@pytest.fixture
def ai(node: DaemonProcess) -> Iterator[openai.OpenAI]:
    url = f"{node.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client
