"""A node that is told to stop finishes what runs and takes nothing new: real daemons, openai's client."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is a pipeline?"}]
N_TOKENS = 1500


@contextmanager
def streaming(node: DaemonProcess) -> Iterator[Iterator[Any]]:
    """A stream of N_TOKENS; its first chunk has come."""
    with (
        openai.OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as ai,
        ai.chat.completions.create(
            model="guide",
            messages=QUESTION,  # type: ignore[arg-type]
            max_tokens=N_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as stream,
    ):
        chunks = iter(stream)
        next(chunks)
        yield chunks


def complete(node: DaemonProcess) -> bool:
    return bool(node.http.get("/api/admin/models/guide/status").json()["complete"])


def last_reason(chunks: Iterator[Any]) -> str | None:
    return [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1]


def state(node: DaemonProcess) -> str:
    return str(node.http.get("/health/ready").json()["status"])


def test_a_stream_ends_whole_and_new_requests_are_refused(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "a", load=["guide"], node={"drain_timeout_s": 600}) as node:
        wait_for(lambda: state(node) == "ready", DEADLINE_S, "the model to be loaded")
        with streaming(node) as chunks:
            node.process.send_signal(signal.SIGTERM)
            wait_for(lambda: state(node) == "stopping", DEADLINE_S, "the node to notice")
            refused = node.http.post("/v1/chat/completions", json={"model": "guide", "messages": QUESTION})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "node_stopping"
            assert last_reason(chunks) == "length"
        assert node.process.wait(DEADLINE_S) == 0


def test_after_the_limit_a_stream_ends_with_an_error_event(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "a", load=["guide"], node={"drain_timeout_s": 0}) as node:
        wait_for(lambda: state(node) == "ready", DEADLINE_S, "the model to be loaded")
        with streaming(node) as chunks:
            node.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError) as caught:
                list(chunks)
            assert caught.value.code == "node_stopping"
        assert node.process.wait(DEADLINE_S) == 0


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "a", load=["guide"], node={"drain_timeout_s": 600}) as node:
        wait_for(lambda: state(node) == "ready", DEADLINE_S, "the model to be loaded")
        with streaming(node) as chunks:
            node.process.send_signal(signal.SIGTERM)
            wait_for(lambda: state(node) == "stopping", DEADLINE_S, "the node to notice")
            node.process.send_signal(signal.SIGINT)
            assert node.process.wait(DEADLINE_S) == 0
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                list(chunks)


def test_a_stage_is_not_planned_over_but_serves_the_stream_that_runs(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, "a", load=["guide:0:6"]) as origin,
        running_daemon(
            tmp_path,
            "b",
            load=["guide:6:12"],
            bootstrap=origin.addresses,
            node={"drain_timeout_s": 600},
        ) as stage,
    ):
        wait_for(lambda: complete(origin), DEADLINE_S, "the origin to know holders of all layers")
        with streaming(origin) as chunks:
            stage.process.send_signal(signal.SIGTERM)
            wait_for(lambda: not complete(origin), DEADLINE_S, "the origin to plan without the stage")
            assert stage.process.poll() is None
            assert last_reason(chunks) == "length"
        assert stage.process.wait(DEADLINE_S) == 0
