"""Each node of a cut swarm restarts in turn while clients stream: real daemons, openai's client."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S

pytestmark = [pytest.mark.slow, pytest.mark.long]

QUESTION = [{"role": "user", "content": "What is a pipeline?"}]
N_TOKENS = 100
N_TOKENS_MOVED = 250
"""So many that a stream does not end while the node that it runs over takes its leave."""
LAYERS = {
    "a": ["guide:0:8"],
    "b": ["guide:4:12"],
    "c": ["guide:0:4", "guide:8:12"],
}
"""No node holds the whole model, and any two of them hold all of it."""


@dataclass
class Swarm:
    folder: Path
    drain_timeout_s: float
    n_tokens: int
    """Of each stream."""
    nodes: dict[str, DaemonProcess] = field(default_factory=dict)
    stacks: dict[str, ExitStack] = field(default_factory=dict)

    def start(self, name: str) -> None:
        bootstrap = [address for node in self.nodes.values() for address in node.addresses]
        self.stacks[name] = ExitStack()
        self.nodes[name] = self.stacks[name].enter_context(
            running_daemon(
                self.folder,
                name,
                load=LAYERS[name],
                bootstrap=bootstrap,
                node={"drain_timeout_s": self.drain_timeout_s},
                model={"restore": False},
            )
        )

    def stop(self, name: str) -> int:
        """What the process ends with."""
        node = self.nodes[name]
        node.process.send_signal(signal.SIGTERM)
        status = node.process.wait(DEADLINE_S)
        del self.nodes[name]
        self.stacks.pop(name).close()
        return status

    def wait_whole(self) -> None:
        """Every node knows that all three hold their layers."""
        for node in self.nodes.values():
            wait_for(lambda node=node: n_holders(node) == len(LAYERS), DEADLINE_S, "all holders to be known")


def n_holders(node: DaemonProcess) -> int:
    return len(node.http.get("/api/admin/models/guide/status").json()["holders"])


@contextmanager
def running_swarm(folder: Path, drain_timeout_s: float, n_tokens: int) -> Iterator[Swarm]:
    swarm = Swarm(folder, drain_timeout_s, n_tokens)
    try:
        for name in LAYERS:
            swarm.start(name)
        swarm.wait_whole()
        yield swarm
    finally:
        for stack in swarm.stacks.values():
            stack.close()


class Asker(threading.Thread):
    """Streams one answer after the other from the first of `names` that takes the request."""

    def __init__(self, swarm: Swarm, names: list[str]) -> None:
        super().__init__(daemon=True)
        self._swarm = swarm
        self._names = names
        self._ends = threading.Event()
        self.n_whole = 0
        self.begun_on: list[str] = []
        self.broken: list[str] = []

    def run(self) -> None:
        while not self._ends.is_set() and not self.broken:
            try:
                self._stream()
            except Exception as error:
                self.broken.append(repr(error))

    def end(self) -> None:
        self._ends.set()
        self.join(DEADLINE_S)
        assert not self.is_alive()

    def _stream(self) -> None:
        for name in self._names:
            node = self._swarm.nodes.get(name)
            if node is None:
                continue
            with openai.OpenAI(
                base_url=f"{node.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
            ) as ai:
                try:
                    stream: Any = ai.chat.completions.create(
                        model="guide",
                        messages=QUESTION,  # type: ignore[arg-type]
                        max_tokens=self._swarm.n_tokens,
                        stream=True,
                        stream_options={"include_usage": True},
                        extra_body={"ignore_eos": True},
                    )
                except openai.APIConnectionError:
                    continue  # It has gone; nothing was asked of it.
                except openai.InternalServerError as error:
                    if error.status_code != 503:
                        raise
                    continue  # It stops, or it has just started and does not know the others yet.
                self.begun_on.append(name)
                with stream:
                    chunks = list(stream)
            reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
            assert reasons[-1] == "length", f"a stream of {name} ended with {reasons[-1]}"
            assert chunks[-1].usage.completion_tokens == self._swarm.n_tokens
            self.n_whole += 1
            return
        raise AssertionError("no node took the request")


@contextmanager
def asking(swarm: Swarm, *orders: list[str]) -> Iterator[list[Asker]]:
    askers = [Asker(swarm, order) for order in orders]
    for asker in askers:
        asker.start()
    try:
        more_answers(askers)
        yield askers
    finally:
        for asker in askers:
            asker.end()


def more_answers(askers: list[Asker]) -> None:
    before = [asker.n_whole for asker in askers]

    def went_on() -> bool:
        assert not any(asker.broken for asker in askers), [asker.broken for asker in askers]
        return all(asker.n_whole > n for asker, n in zip(askers, before, strict=True))

    wait_for(went_on, DEADLINE_S, "further answers")


def test_no_stream_breaks_while_each_node_restarts(tmp_path: Path) -> None:
    with (
        running_swarm(tmp_path, drain_timeout_s=30, n_tokens=N_TOKENS) as swarm,
        asking(swarm, ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]) as askers,
    ):
        for name in LAYERS:
            assert swarm.stop(name) == 0
            more_answers(askers)
            swarm.start(name)
            swarm.wait_whole()
            more_answers(askers)
    assert [asker.broken for asker in askers] == [[], [], []]
    assert all(len(set(asker.begun_on)) > 1 for asker in askers), "who lost its node asked another one"


def test_streams_move_when_a_stage_may_not_wait_for_them(tmp_path: Path) -> None:
    with (
        running_swarm(tmp_path, drain_timeout_s=0, n_tokens=N_TOKENS_MOVED) as swarm,
        asking(swarm, ["a"], ["a"]) as askers,
    ):
        for name in ("b", "c", "b", "c"):
            assert swarm.stop(name) == 0
            more_answers(askers)
            # A stream may end just before its node leaves; then there are two more nodes to leave.
            n_moved = swarm.nodes["a"].stats()["pipelines"]["recoveries"]
            if n_moved and name == "c":
                break
            swarm.start(name)
            swarm.wait_whole()
    assert [asker.broken for asker in askers] == [[], []]
    assert n_moved > 0, "no stream ran over a node that left"
