"""A worker says when it computes, and computes with as many threads as it is told."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from swarmllm.guide import GUIDE_PATH
from swarmllm_proto import ipc
from swarmllm_workers import operating_system
from swarmllm_workers.schedule.thread_use import REST_S, ThreadUse
from swarmllm_workers.server.handlers import Handlers

from .client import Worker
from .test_batching import OpenRoom, Room, open_room  # noqa: F401

# ruff: noqa: F811 (fixtures are imported)

GREEDY = ipc.Sampling(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=True, top_logprobs=2)
PROMPT = np.arange(40, 60, dtype=np.int32)


class Said:
    def __init__(self) -> None:
        self.at_work: list[bool] = []
        self.now = 100.0
        self.use = ThreadUse(lambda message: self.at_work.append(message.is_at_work), clock=lambda: self.now)


def test_it_says_once_that_it_computes_and_after_a_while_that_it_rests() -> None:
    said = Said()
    assert said.use.pause_ms() is None
    said.use.stepped()
    said.use.stepped()
    assert said.at_work == [True]
    said.now += REST_S / 2
    assert said.use.pause_ms() == int(REST_S / 2 * 1000) + 1
    said.use.stepped()
    said.now += REST_S * 0.9
    assert said.use.pause_ms() is not None
    assert said.at_work == [True]
    said.now += REST_S * 0.2
    assert said.use.pause_ms() is None
    assert said.at_work == [True, False]
    assert said.use.pause_ms() is None
    said.use.stepped()
    assert said.at_work == [True, False, True]


def test_others_learn_of_a_prompt_before_its_first_piece_is_computed(open_room: OpenRoom) -> None:
    room = open_room(GUIDE_PATH, (0, 12), n_ctx=1024)
    room.generate(PROMPT, "r", GREEDY)
    said: list[object] = []
    scheduler = room.handlers.state.scheduler
    assert scheduler is not None
    step = scheduler.step
    scheduler.step = lambda: (said.extend(message for message, _ in room.sent), step())[1]  # type: ignore[method-assign]
    room.run(1)
    assert said[-1] == ipc.AtWork(is_at_work=True)


def test_it_never_uses_more_threads_than_configured() -> None:
    said = Said()
    said.use.configure(4)
    assert said.use.threads.n == 4
    said.use.use(2)
    assert said.use.threads.n == 2
    said.use.use(9)
    assert said.use.threads.n == 4


@pytest.mark.skipif(not operating_system.IS_LINUX, reason="cores are chosen on Linux alone")
def test_threads_leave_their_cores_while_others_are_at_work_and_return() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    where: list[set[int]] = []
    turns = [threading.Event() for _ in range(3)]

    def pinned() -> None:
        os.sched_setaffinity(0, {cores[-1]})
        turns[0].set()
        for turn in turns[1:]:
            turn.wait(60)
            where.append(os.sched_getaffinity(0))
            turn.clear()

    thread = threading.Thread(target=pinned)
    thread.start()
    turns[0].wait(60)
    use = ThreadUse(lambda _: None, cores)
    use.configure(len(cores))
    try:
        use.use(1)
        use.stepped()
        native_id = thread.native_id or 0
        assert os.sched_getaffinity(native_id) == set(cores)
        use.use(len(cores))
        use.stepped()
        assert os.sched_getaffinity(native_id) == {cores[-1]}
    finally:
        for turn in turns:
            turn.set()
        thread.join(60)
    assert len(where) == 2


def told(room: Room) -> list[tuple[int, object]]:
    return [(m.token, m.logprobs) for m, _ in room.sent if isinstance(m, ipc.Token)]


def n_threads_of(room: Room) -> set[int]:
    segments = room.handlers.state.engine().layers.segments
    return {llama_cpp.llama_n_threads(segment._context.handle) for segment in segments}


@pytest.mark.parametrize("flash_attention", ["auto", "off"])
def test_the_bits_of_an_answer_do_not_depend_on_when_threads_come_and_go(
    open_room: OpenRoom, flash_attention: str
) -> None:
    settings = {"n_ctx": 1024, "n_threads": 2, "flash_attention": flash_attention}
    steady, shared = (open_room(GUIDE_PATH, (0, 12), **settings) for _ in range(2))
    steady.generate(PROMPT, "r", GREEDY)
    steady.run()
    assert n_threads_of(steady) == {2}
    shared.generate(PROMPT, "r", GREEDY)
    shared.run(2)
    shared.call(ipc.UseThreads, n_threads=1)
    shared.run(2)
    assert n_threads_of(shared) == {1}
    shared.call(ipc.UseThreads, n_threads=2)
    shared.run()
    assert n_threads_of(shared) == {2}
    assert len(told(shared)) == 6
    assert told(shared) == told(steady)


def test_segments_of_exact_requests_keep_the_configured_number(open_room: OpenRoom) -> None:
    room = open_room(GUIDE_PATH, (0, 12), n_ctx=1024, n_threads=2, n_prefixes=0)
    room.call(ipc.UseThreads, n_threads=1)
    exact = ipc.Sampling(temperature=0.0, max_tokens=4, ignore_eos=True, exact=True)
    room.generate(PROMPT, "exact", exact)
    room.run(3)
    (segment,) = room.handlers.state.engine().layers.segments
    assert [llama_cpp.llama_n_threads(each._context.handle) for each in segment.apart_segments] == [2]
    room.run()
    assert len(room.tokens("exact")) == 4


def test_a_model_must_be_open() -> None:
    said: list[object] = []
    handlers = Handlers(lambda message, payload=b"": said.append(message), lambda *_: None, lambda: None)
    handlers.handle(ipc.UseThreads(id=3, n_threads=1), memoryview(b""))
    (error,) = said
    assert isinstance(error, ipc.Error)
    assert (error.id, error.kind) == (3, "bad_message")


@pytest.mark.slow
def test_a_worker_process_says_when_it_is_at_work(tmp_path: Path) -> None:
    worker = Worker(tmp_path / "socket")
    try:
        worker.call(ipc.Open, path=str(GUIDE_PATH), cache_dir=str(tmp_path / "segments"), n_threads=1)
        worker.call(ipc.Load, start=0, end=12)
        assert worker.at_work == []
        worker.generate(PROMPT)
        assert worker.at_work == [True]
        while worker.at_work == [True]:
            # Answered at once; the worker's own word comes when it has rested.
            worker.call(ipc.ReleaseRequestKv, request_id="-")
        assert worker.at_work == [True, False]
    finally:
        worker.close()
