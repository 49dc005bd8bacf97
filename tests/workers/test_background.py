"""Operations whose long parts run in a thread, and what comes between two of those."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import DEADLINE_S

from swarmllm_proto import ipc
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.decode.bounded_call import TookTooLong, bounded
from swarmllm_workers.engine.operation import Operation, complete
from swarmllm_workers.engine.segment import Segment
from swarmllm_workers.engine.segment_maker import SegmentMaker
from swarmllm_workers.errors import CallError
from swarmllm_workers.kernels.kernel_choice import NEVER_LARGE
from swarmllm_workers.server.background import BackgroundThread, ThreadInbox
from swarmllm_workers.server.handlers import Handlers

from .client import GREEDY, worker_environment
from .conftest import MakeModel

PROMPT = np.array([72, 101, 108, 108, 111, 44], np.int32)
ENDLESS = ipc.Sampling(temperature=0.0, max_tokens=4000, ignore_eos=True)


class Gate:
    """Parts stop here until they are let through."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.opened = threading.Semaphore(0)
        self.on_arrival: Callable[[], None] = lambda: None

    def wait(self) -> None:
        self.arrived.release()
        self.on_arrival()
        assert self.opened.acquire(timeout=DEADLINE_S)

    def until_arrived(self, inbox: ThreadInbox | None = None) -> None:
        """`inbox`: parts that come before are handled meanwhile."""
        while not self.arrived.acquire(timeout=DEADLINE_S if inbox is None else 0):
            assert inbox is not None
            receive(inbox)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.release(1000)


@pytest.fixture
def inbox() -> Iterator[ThreadInbox]:
    inbox = ThreadInbox()
    yield inbox
    inbox.close()


def receive(inbox: ThreadInbox) -> None:
    readable, _, _ = select.select([inbox.descriptor], [], [], DEADLINE_S)
    assert readable
    inbox.run()


def test_code_between_parts_runs_in_the_thread_that_began_and_parts_in_another(inbox: ThreadInbox) -> None:
    thread = BackgroundThread("test", inbox)
    seen: list[Any] = []

    def operation(name: str) -> Operation[None]:
        seen.append((name, threading.current_thread().name))
        seen.append((yield lambda: threading.current_thread().name))
        try:
            yield partial(int, "x")
        except ValueError:
            seen.append((name, threading.current_thread().name))

    def broken() -> Operation[None]:
        yield partial(int, "y")

    for each in (operation("a"), broken(), operation("b")):
        thread.begin(each, lambda error: seen.append(type(error)))
    while thread.n_waiting:
        receive(inbox)
    own = threading.current_thread().name
    assert seen == [("a", own), "test", ("a", own), ValueError, ("b", own), "test", ("b", own)]
    thread.stop()
    assert not thread.is_alive


def test_an_operation_done_at_once_gets_results_and_errors_of_its_parts() -> None:
    def operation() -> Operation[int]:
        try:
            yield partial(int, "x")
        except ValueError:
            return (yield partial(int, "7"))
        return 0

    assert complete(operation()) == 7


def test_a_part_that_tells_of_its_progress_ends_when_the_process_does(inbox: ThreadInbox, gate: Gate) -> None:
    thread = BackgroundThread("test", inbox)
    seen: list[str] = []

    def part() -> None:
        thread.tell(lambda: seen.append("before"))
        gate.wait()
        thread.tell(lambda: seen.append("after"))

    def operation() -> Operation[None]:
        yield part

    thread.begin(operation(), lambda error: seen.append(type(error).__name__))
    gate.until_arrived()
    thread._is_stopping = True
    gate.opened.release()
    thread.stop()
    assert not thread.is_alive
    inbox.run()
    assert seen == ["before", "Stopped"]


def test_python_code_is_interrupted_in_any_thread_and_only_there() -> None:
    found: list[str] = []

    def endless() -> None:
        try:
            with bounded(0.05):
                while True:
                    pass
        except TookTooLong as error:
            found.append(str(error))

    thread = threading.Thread(target=endless)
    thread.start()
    thread.join(DEADLINE_S)
    assert found == ["it ran for more than 0.05 s"]
    with bounded(DEADLINE_S):
        found.clear()


def test_code_can_be_traced_after_bounded_code() -> None:
    """An exception that is withdrawn although none was set makes CPython 3.11 hang under a trace function."""
    program = """
import sys
from swarmllm_workers.decode.bounded_call import bounded
with bounded(60):
    pass
def count():
    n = 0
    while n < 10:
        n += 1
    return n
sys.settrace(lambda *_: sys.gettrace())
print(count())
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=worker_environment(),
        capture_output=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert run.stdout == b"10\n"


def test_what_another_thread_is_about_to_map_does_not_count_against_bounded_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a process of its own: limits of the address space hold for all threads of it."""
    script = """
import mmap
from swarmllm_workers.decode import bounded_call
bounded_call.MEMORY_MAX = 16 * 2**20
def fits():
    try:
        mmap.mmap(-1, 200 * 2**20).close()
    except OSError:
        return False
    return True
with bounded_call.bounded(60):
    print(fits())
    with bounded_call.mapping(2**29):
        print(fits())
with bounded_call.mapping(2**29), bounded_call.bounded(60):
    print(fits())
with bounded_call.bounded(60):
    print(fits())
print(fits())
"""
    result = subprocess.run(
        [sys.executable, "-c", script], env=worker_environment(), capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "True", "True", "False", "True"]


class Room:
    """A worker without its process, with its threads. Segments are opened when the gate lets them."""

    def __init__(self, path: Path, folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[Any] = []
        self.n_calls = 0
        self.inbox = ThreadInbox()
        self.loading = BackgroundThread("loading", self.inbox)
        self.parsing = BackgroundThread("parsing", self.inbox)
        self.handlers = Handlers(
            lambda message, payload=b"": self.sent.append(message),
            lambda *_: None,
            lambda: None,
            None,
            self.loading,
            self.parsing,
        )
        self.call(ipc.Open, path=str(path), cache_dir=str(folder / "segments"), n_ctx=512, n_slots=3)
        gate.on_arrival = lambda: self.inbox.put(lambda: None)
        open_ = SegmentMaker.open
        self.refuses = False

        def opened(maker: SegmentMaker, start: int, end: int, *more: Any, **within: Any) -> Segment:
            gate.wait()
            if self.refuses:
                raise CallError("out_of_memory", "none left")
            return open_(maker, start, end, *more, **within)

        monkeypatch.setattr(SegmentMaker, "open", opened)

    def call(self, kind: type[ipc.DaemonMessage], data: np.ndarray | None = None, **fields: Any) -> int:
        self.n_calls += 1
        payload = b"" if data is None else b"".join(encode_tensor(data))
        self.handlers.handle(kind(id=self.n_calls, **fields), memoryview(payload))
        return self.n_calls

    def forward(self, request_id: str, start: int, end: int, position: int = 0) -> int:
        row = np.ones((1, 64), np.float32)
        return self.call(
            ipc.Forward, row, request_id=request_id, start=start, end=end, position=position, want="hidden"
        )

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.handlers.step()

    def finish(self) -> None:
        """Everything that is under way."""
        while self.loading.n_waiting or self.parsing.n_waiting or self.handlers.state.has_work:
            if self.loading.n_waiting or self.parsing.n_waiting:
                receive(self.inbox)
            self.handlers.step()

    def answers(self, call_id: int) -> list[Any]:
        return [each for each in self.sent if each.id == call_id and not isinstance(each, ipc.Progress)]

    def answer(self, call_id: int) -> Any:
        (found,) = self.answers(call_id)
        return found

    def close(self) -> None:
        self.loading.stop()
        self.parsing.stop()
        assert not self.loading.is_alive
        self.handlers.close()
        self.inbox.close()


@pytest.fixture
def room(
    make_model: MakeModel, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Room]:
    room = Room(make_model("llama"), tmp_path, gate, monkeypatch)
    yield room
    gate.opened.release(1000)
    room.close()


def load(room: Room, gate: Gate, start: int, end: int) -> None:
    call_id = room.call(ipc.Load, start=start, end=end)
    gate.until_arrived(room.inbox)
    gate.opened.release()
    room.finish()
    assert isinstance(room.answer(call_id), ipc.Loaded)


def test_steps_go_on_while_layers_are_opened_and_find_them_afterwards(room: Room, gate: Gate) -> None:
    load(room, gate, 0, 2)
    loading = room.call(ipc.Load, start=2, end=4)
    gate.until_arrived(room.inbox)
    step = room.forward("r", 0, 2)
    early = room.forward("early", 2, 3)
    room.step(2)
    assert isinstance(room.answer(step), ipc.LayerResult)
    assert room.answer(early).kind == "not_loaded"
    assert not room.answers(loading)
    gate.opened.release()
    room.finish()
    assert room.answer(loading).ranges == ((0, 4),)
    generate = room.call(ipc.Generate, PROMPT, request_id="g", sampling=GREEDY)
    room.finish()
    assert isinstance(room.answers(generate)[-1], ipc.GenerateDone)


def test_a_request_waits_for_its_layers_to_be_cut_and_one_in_the_old_segment_goes_on(
    room: Room, gate: Gate
) -> None:
    load(room, gate, 0, 4)
    room.call(ipc.Generate, PROMPT, request_id="stream", sampling=ENDLESS)
    room.step(3)
    part = room.forward("part", 1, 3)
    again = room.forward("again", 1, 3)
    room.step()
    gate.until_arrived(room.inbox)
    n_before = len(room.sent)
    room.step(5)
    assert {type(each) for each in room.sent[n_before:]} == {ipc.Token}
    assert len(room.sent) == n_before + 5
    gate.opened.release(3)
    while room.loading.n_waiting:
        receive(room.inbox)
    room.step()
    for call_id in (part, again):
        assert isinstance(room.answer(call_id), ipc.LayerResult)
    assert room.loading.n_waiting == 0, "both waited for the same cut"
    engine = room.handlers.state.engine()
    assert [(each.start, each.end) for each in engine.layers.retired] == [(0, 4)]
    room.call(ipc.CancelRequest, request_id="stream")
    room.finish()
    assert not engine.layers.retired
    assert not room.handlers.state.has_work


def test_a_request_whose_segments_are_cut_in_the_turn_in_which_it_would_begin_begins_in_the_parts(
    room: Room, gate: Gate
) -> None:
    """It has no rows yet, so the segment looks unused when the other one's layers are cut."""
    load(room, gate, 0, 3)
    whole = room.forward("whole", 0, 3)
    part = room.forward("part", 0, 2)
    gate.opened.release(1000)
    room.step()
    room.finish()
    for call_id in (whole, part):
        assert isinstance(room.answer(call_id), ipc.LayerResult)


def test_only_waiting_for_layers_the_worker_sleeps(room: Room, gate: Gate) -> None:
    load(room, gate, 0, 4)
    room.forward("part", 1, 3)
    room.step()
    gate.until_arrived(room.inbox)
    assert (room.handlers.pause_ms() or 0) > 0
    gate.opened.release(3)
    room.finish()


def test_what_cannot_be_cut_fails_those_who_waited_and_nobody_else(room: Room, gate: Gate) -> None:
    load(room, gate, 0, 4)
    room.call(ipc.Generate, PROMPT, request_id="stream", sampling=ENDLESS)
    room.step(3)
    waiting = [room.forward(name, 1, 3) for name in "ab"]
    room.step()
    gate.until_arrived(room.inbox)
    room.refuses = True
    gate.opened.release()
    while room.loading.n_waiting:
        receive(room.inbox)
    for call_id in waiting:
        assert room.answer(call_id).kind == "out_of_memory"
    n_before = len(room.sent)
    room.step(3)
    assert len(room.sent) == n_before + 3
    room.refuses = False
    gate.opened.release(10)
    later = room.forward("later", 1, 3)
    room.step()
    while room.loading.n_waiting:
        receive(room.inbox)
    room.step()
    assert isinstance(room.answer(later), ipc.LayerResult), "what is held is loaded at its next use"


def bounds(room: Room) -> list[tuple[int, int]]:
    engine = room.handlers.state.engine()
    return sorted((segment.start, segment.end) for segment in engine.layers.segments)


def test_layers_are_cut_before_a_request_needs_them(room: Room, gate: Gate) -> None:
    gate.opened.release(1000)
    room.call(ipc.Load, start=0, end=4)
    room.finish()

    def cut(start: int, end: int, *, if_idle: bool = False) -> Any:
        call_id = room.call(ipc.Cut, start=start, end=end, if_idle=if_idle)
        room.finish()
        return room.answer(call_id)

    assert isinstance(cut(1, 3, if_idle=True), ipc.Done)
    assert bounds(room) == [(0, 1), (1, 3), (3, 4)]
    room.forward("r", 1, 3)
    room.finish()
    # Its rows would have to stay behind in a segment of their own.
    assert isinstance(cut(2, 3, if_idle=True), ipc.Done)
    assert bounds(room) == [(0, 1), (1, 3), (3, 4)]
    assert isinstance(cut(2, 3), ipc.Done)
    assert bounds(room) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert cut(2, 5).kind == "cannot_cut"


def test_a_request_that_is_cancelled_while_its_layers_are_cut_leaves_nothing(room: Room, gate: Gate) -> None:
    load(room, gate, 0, 4)
    part = room.forward("part", 1, 3)
    room.step()
    gate.until_arrived(room.inbox)
    cancel = room.call(ipc.CancelRequest, request_id="part")
    assert room.answer(part).kind == "engine"
    assert isinstance(room.answer(cancel), ipc.Done)
    assert not room.handlers.state.has_work
    gate.opened.release(3)
    room.finish()
    engine = room.handlers.state.engine()
    assert len(engine.slots) == 0
    assert len(engine.layers.segments) == 3


def test_an_unload_that_comes_during_a_load_follows_it(room: Room, gate: Gate) -> None:
    load(room, gate, 0, 1)
    loading = room.call(ipc.Load, start=1, end=4)
    gate.until_arrived(room.inbox)
    unloading = room.call(ipc.Unload, start=2, end=3)
    assert not room.answers(unloading)
    gate.opened.release(4)
    room.finish()
    assert room.answer(loading).ranges == ((0, 4),)
    assert room.answer(unloading).ranges == ((0, 2), (3, 4))
    assert [type(each) for each in room.sent if each.id in (loading, unloading)].count(ipc.Loaded) == 2


def test_a_load_that_fails_is_told_and_the_next_one_is_made(room: Room, gate: Gate) -> None:
    room.refuses = True
    failing = room.call(ipc.Load, start=0, end=2)
    gate.until_arrived(room.inbox)
    outside = room.call(ipc.Load, start=3, end=9)
    gate.opened.release()
    room.finish()
    assert room.answer(failing).kind == "out_of_memory"
    assert room.answer(outside).kind == "cannot_cut"
    room.refuses = False
    load(room, gate, 0, 2)


def test_what_a_load_will_take_is_judged_beside_what_the_one_before_it_took(
    room: Room, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = room.handlers.state.engine()
    held: list[int] = []

    def refuse(needed: Any, what: str, memory: Any, *others: Any) -> None:
        held.append(memory.total_bytes)

    monkeypatch.setattr("swarmllm_workers.engine.memory.refuse_beside", refuse)
    room.call(ipc.Load, start=0, end=2)
    gate.until_arrived(room.inbox)
    room.call(ipc.Load, start=2, end=4)
    gate.opened.release(2)
    room.finish()
    assert held[0] == 0
    assert held[1] > 0
    assert engine.memory.total_bytes > held[1]


def test_the_worker_says_goodbye_while_layers_are_opened(room: Room, gate: Gate) -> None:
    loading = room.call(ipc.Load, start=0, end=4)
    gate.until_arrived(room.inbox)
    room.call(ipc.Shutdown)
    assert room.handlers.state.is_finished
    assert isinstance(room.sent[-1], ipc.Bye)
    assert not room.answers(loading)


def test_products_are_timed_when_nobody_decodes(
    room: Room, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(room, gate, 0, 2)
    tuned: list[bool] = []
    seen: set[str] = set()

    def tune(self: Any, sources: Any, n_threads: int, *, measures: bool = True) -> bool:
        tuned.append(measures)
        seen.update(name.split(".")[1] for source in sources for name in source.tensors if "blk." in name)
        return measures

    monkeypatch.setattr("swarmllm_workers.kernels.kernel_tuning.KernelTuning.tune", tune)
    monkeypatch.setattr("swarmllm_workers.kernels.kernel_tuning.KernelTuning.is_on", True)
    for position in range(3):
        room.forward("r", 0, 2, position)
    room.step()
    room.call(ipc.Load, start=2, end=3)
    gate.until_arrived(room.inbox)
    gate.opened.release()
    while room.loading.n_waiting:
        receive(room.inbox)
    assert tuned == [False]
    room.handlers.state.engine().large_batch_from = NEVER_LARGE
    monkeypatch.setattr("swarmllm_workers.kernels.kernel_tuning.KernelTuning.large_batch_from", 20)
    assert seen == {"0", "1", "2"}  # of layers that are loaded
    room.finish()
    room.handlers.pause_ms()
    room.finish()
    assert tuned == [False, True]
    assert room.handlers.state.engine().large_batch_from == 20
