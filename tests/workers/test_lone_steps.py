"""Decode jobs that a worker runs as they come: they give the bytes that works give, or are left to those."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from node_ids import A, B

from swarmllm.guide import GUIDE_PATH
from swarmllm_proto import ipc
from swarmllm_proto.codec import decode_job, encode_job_frame
from swarmllm_proto.fingerprints import FINGERPRINT_BYTES
from swarmllm_proto.swarm import JobMessage, LayerForward, StreamingToken
from swarmllm_proto.tensors import tensor_bytes
from swarmllm_workers.kernels.interposing import find_library
from swarmllm_workers.ring.link import ReceivingLink, SendingLink
from swarmllm_workers.ring.ring import REPORT_INTERVAL_S
from swarmllm_workers.schedule import cohorts, lone_steps
from swarmllm_workers.server.handlers import Handlers

SECRET = bytes(range(32)) + bytes(8)
N_EMBD = 256
N_STEPS = 70
"""More than a block of the journal."""
GREEDY = ipc.Sampling(temperature=0.0, max_tokens=1000, ignore_eos=True)
NATIVE = pytest.param(
    True, marks=pytest.mark.skipif(find_library("lone_row") is None, reason="lone_row.c was not built")
)

MakeStage = Callable[..., "Stage"]


def row(seed: int, n_rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n_rows, N_EMBD)).astype(np.float32)


class Stage:
    """A worker's handlers with layers of the guide, between two links whose other ends are here."""

    def __init__(self, folder: Path, start: int, end: int, **settings: Any) -> None:
        self.said: list[Any] = []
        self.payloads: list[bytes] = []
        self._ends: list[int] = []
        self._n_steps = 0
        self.range = start, end
        self.handlers = Handlers(
            self._hear,
            lambda descriptor, events: None,
            self._ends.pop,
        )
        self.handle(ipc.Open(id=7, path=str(GUIDE_PATH), cache_dir=str(folder), n_ctx=512, **settings))
        self.handle(ipc.Load(id=7, start=start, end=end))
        (ours, self._receiving), (theirs, sending) = socket.socketpair(), socket.socketpair()
        self._descriptor = self._receiving.fileno()
        for end_of_link, peer, direction in (
            (self._receiving, A, "receiving"),
            (sending, B, "sending"),
        ):
            self._ends.append(end_of_link.detach())
            self.handle(ipc.TakeLink(id=7, peer=peer, direction=direction), memoryview(SECRET))  # type: ignore[arg-type]
        self._before, self._after = SendingLink(ours, SECRET), ReceivingLink(theirs, SECRET)

    def _hear(self, message: Any, payload: Any = b"") -> None:
        self.said.append(message)
        self.payloads.append(payload if isinstance(payload, bytes) else b"".join(payload))

    def handle(self, message: Any, payload: memoryview = memoryview(b"")) -> None:  # noqa: B008
        self.handlers.handle(message, payload)
        while self.handlers.state.has_work:
            self.handlers.step()
        assert not any(isinstance(each, ipc.Error) for each in self.said), self.said

    def seat(self, request_id: str) -> None:
        """And its prompt, one row."""
        start, end = self.range
        sampling = msgspec.structs.replace(GREEDY, fingerprint_key=5) if end == 12 else None
        self.handle(
            ipc.TakeSeat(
                id=7,
                request_id=request_id,
                stage=min(start, 1),
                start=start,
                end=end,
                before=A,
                after=B,
                origin=B,
                n_prompt_tokens=1,
                sampling=sampling,
            )
        )
        forward = ipc.Forward(
            id=7,
            request_id=request_id,
            start=start,
            end=end,
            position=0,
            want="hidden" if sampling is None else "token",
            sampling=sampling,
            n_prompt_tokens=1,
        )
        self.handle(forward, memoryview(tensor_bytes(row(0) if start else np.array([5], np.int32))))

    def job(self, request_id: str, position: int, seed: int = 0) -> tuple[LayerForward, bytes]:
        is_first = not self.range[0]
        message = LayerForward(
            request_id=request_id,
            step="embed" if is_first else "layer",
            stage=min(self.range[0], 1),
            position=position,
            n_tokens=1,
            token=seed if is_first else 0,
        )
        return message, b"" if is_first else tensor_bytes(row(seed))

    def deliver(self, *jobs: tuple[LayerForward, bytes], alone: bool = True) -> int:
        """How many steps the works made; the others were lone ones."""
        self._before.send([encode_job_frame(*job) for job in jobs])
        self.handlers.ring.on_event(self._descriptor, select.POLLIN, is_last=alone)
        n_steps = 0
        while self.handlers.state.has_work:
            self.handlers.step()
            n_steps += 1
        return n_steps

    def passed_on(self) -> list[tuple[JobMessage, bytes]]:
        return [
            (decode_job(each.header, each.payload), bytes(each.payload)) for each in self._after.receive()
        ]

    def refusals(self) -> list[tuple[str, str]]:
        """Errors, and jobs that are handed up to the daemon because they are their sender's fault."""
        refusals = [(each.kind, each.message) for each in self.said if isinstance(each, ipc.Error)]
        refusals += [("handed up", each.sender) for each in self.said if isinstance(each, ipc.Arrived)]
        self.said.clear()
        return refusals

    def close(self) -> None:
        self.handlers.close()
        self._before.connection.close()
        self._after.connection.close()


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStage]:
    """`stages(start, end, native=False)`"""
    made: list[Stage] = []

    def make(start: int, end: int, *, native: bool = True) -> Stage:
        if not native:
            monkeypatch.setattr(lone_steps, "find_library", lambda name: None)
        made.append(Stage(tmp_path, start, end))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


def essence(passed: list[tuple[JobMessage, bytes]]) -> list[tuple[object, ...]]:
    """All but whose it is and how long it took."""
    found: list[tuple[object, ...]] = []
    for message, payload in passed:
        if isinstance(message, StreamingToken):
            assert len(message.fingerprint or b"") == FINGERPRINT_BYTES
            found.append((message.index, message.token, message.finish_reason, message.fingerprint, payload))
        else:
            assert isinstance(message, LayerForward)
            found.append(
                (message.step, message.stage, message.position, message.n_tokens, message.token, payload)
            )
    return found


@pytest.mark.parametrize("native", [NATIVE, False])
@pytest.mark.parametrize(("start", "end"), [(0, 4), (4, 8), (8, 12)])
def test_a_lone_step_passes_on_what_works_would(
    stages: MakeStage, start: int, end: int, native: bool
) -> None:
    stage = stages(start, end, native=native)
    began_s = time.perf_counter()
    for request_id in ("lone", "work"):
        stage.seat(request_id)
    for position in range(1, N_STEPS):
        assert stage.deliver(stage.job("lone", position, position)) == 0
        lone = stage.passed_on()
        assert stage.deliver(stage.job("work", position, position), alone=False) == 1
        work = stage.passed_on()
        assert essence(lone) == essence(work) != []
    engine = stage.handlers.state.engine()
    if start:
        came = [engine.received.read(request_id, start, 1, N_STEPS - 1) for request_id in ("lone", "work")]
        np.testing.assert_array_equal(*came)
    else:
        assert not engine.received.has("lone", start)
    if end != 12:
        for passed in (lone, work):
            (timing,) = passed[0][0].timings  # type: ignore[union-attr]
            assert time.perf_counter() - began_s > timing.busy_s >= timing.compute_s > 0
        kept = [engine.journals.read(request_id, end, 0, N_STEPS) for request_id in ("lone", "work")]
        np.testing.assert_array_equal(*kept)
        assert tensor_bytes(kept[0][-1:]) == lone[0][1]


@pytest.mark.parametrize("native", [NATIVE, False])
@pytest.mark.parametrize(
    ("changed", "payload"),
    [
        pytest.param({}, b"", id="nothing"),
        pytest.param({}, tensor_bytes(row(0))[:-4], id="too little"),
        pytest.param({}, tensor_bytes(row(0).reshape(2, -1)), id="another shape"),
        pytest.param({}, tensor_bytes(row(0).view(np.int32)), id="other numbers"),
        pytest.param({}, tensor_bytes(np.full((1, N_EMBD), np.nan, np.float32)), id="NaN"),
        pytest.param(
            {}, tensor_bytes(np.append(row(0)[0, 1:], [-np.inf]).astype(np.float32)[None]), id="infinity"
        ),
        pytest.param({"n_tokens": 2}, tensor_bytes(row(0)), id="fewer rows than announced"),
        pytest.param({"position": 9}, tensor_bytes(row(0)), id="a gap"),
        pytest.param({"position": 512}, tensor_bytes(row(0)), id="beyond the context"),
    ],
)
def test_what_cannot_be_run_is_refused_in_the_words_of_the_works(
    stages: MakeStage, changed: dict[str, Any], payload: bytes, native: bool
) -> None:
    stage = stages(4, 8, native=native)
    refusals = []
    for request_id, alone in (("lone", True), ("work", False)):
        stage.seat(request_id)
        fields = {"request_id": request_id, "step": "layer", "stage": 1, "position": 1, "n_tokens": 1}
        stage.deliver((LayerForward(**(fields | changed)), payload), alone=alone)
        refusals.append(stage.refusals())
        assert stage.deliver(stage.job(request_id, 1), alone=alone) == (not alone), "the request is as it was"
    assert refusals[0] == refusals[1] != []


def test_a_token_that_there_is_not_is_refused(stages: MakeStage) -> None:
    stage = stages(0, 4)
    stage.seat("r")
    stage.deliver(stage.job("r", 1, seed=10**6))
    assert stage.refusals() == [("handed up", A)]


def test_a_step_that_is_repeated_goes_back_to_its_position(stages: MakeStage) -> None:
    stage = stages(4, 8)
    stage.seat("r")
    for position in range(1, 5):
        stage.deliver(stage.job("r", position, position))
    first = essence(stage.passed_on())
    assert stage.deliver(stage.job("r", 2, 2)) == 1, "what has to be forgotten is no business of a lone step"
    assert stage.deliver(stage.job("r", 3, 3)) == 0
    assert essence(stage.passed_on()) == first[1:3]


def test_jobs_that_come_together_share_a_batch(stages: MakeStage) -> None:
    stage = stages(4, 8)
    for request_id in "ab":
        stage.seat(request_id)
    assert stage.deliver(stage.job("a", 1), stage.job("b", 1)) == 1
    assert stage.deliver(stage.job("a", 2), alone=False) == 1
    assert len(stage.passed_on()) == 3


def counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each batch that it runs from now on."""
    batches: list[int] = []
    engine = stage.handlers.state.engine()
    run = engine.run

    def noted(route: Any, spans: Any) -> Any:
        batches.append(len(spans))
        return run(route, spans)

    monkeypatch.setattr(engine, "run", noted)
    return batches


def test_the_first_stage_runs_as_many_cohorts_as_there_are_stages(
    stages: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each row has the bits that it has in one batch with all others."""
    stage = stages(0, 6)
    for request_id in "abcdwxyz":
        stage.seat(request_id)
    batches = counted(stage, monkeypatch)
    assert stage.deliver(*(stage.job(request_id, 1, seed=7) for request_id in "abcd")) == 2
    assert batches == [2, 2]
    apart = essence(stage.passed_on())
    assert len(apart) == 4
    monkeypatch.setattr(stage.handlers.state.scheduler, "_cohorts", None)
    assert stage.deliver(*(stage.job(request_id, 1, seed=7) for request_id in "wxyz")) == 1
    assert batches == [2, 2, 4]
    assert essence(stage.passed_on()) == apart


def test_a_row_that_does_not_come_holds_nobody_up(stages: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight members half are away for ever: what is here of a cohort runs at once, without them."""
    stage = stages(0, 6)
    for request_id in "abcdwxyz":
        stage.seat(request_id)
    stage.deliver(*(stage.job(request_id, 1, seed=3) for request_id in "abcdwxyz"))
    batches = counted(stage, monkeypatch)
    for position in range(2, 6):
        stage.deliver(*(stage.job(request_id, position, seed=3) for request_id in "abcd"))
    assert sum(batches) == 16
    assert len(stage.passed_on()) == 8 + 16


@pytest.mark.parametrize(("start", "end"), [(4, 8), (8, 12)])
def test_later_stages_run_all_that_has_come_and_send_it_in_one_piece(
    stages: MakeStage, monkeypatch: pytest.MonkeyPatch, start: int, end: int
) -> None:
    stage = stages(start, end)
    for request_id in "abcd":
        stage.seat(request_id)
    batches = counted(stage, monkeypatch)
    assert stage.deliver(*(stage.job(request_id, 1, seed=3) for request_id in "abcd")) == 1
    assert batches == [4]
    after = stage._after.connection
    n_bytes = int.from_bytes(after.recv(2, socket.MSG_PEEK), "big")
    assert n_bytes + 2 == len(after.recv(2**20, socket.MSG_PEEK)), "one message, which is read at once"
    assert len([each for each, _ in stage.passed_on() if isinstance(each, LayerForward)]) == 4


def test_requests_that_are_over_are_members_of_no_cohort(stages: MakeStage) -> None:
    stage = stages(0, 6)
    for request_id in "abcd":
        stage.seat(request_id)
    stage.deliver(*(stage.job(request_id, 1, seed=3) for request_id in "abcd"))
    kept = stage.handlers._cohorts
    assert kept is not None
    for request_id in "ab":
        stage.handle(ipc.CancelRequest(id=7, request_id=request_id))
    assert kept._stages[0, 6].members.keys() == {"c", "d"}
    for request_id in "cd":
        stage.handle(ipc.CancelRequest(id=7, request_id=request_id))
    assert not kept._stages


def test_lone_steps_beside_other_requests_count_for_their_cohorts(
    stages: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cohorts, "MEMBER_AWAY_MIN_S", 1000.0)
    stage = stages(0, 6)
    for request_id in "abcd":
        stage.seat(request_id)
    for request_id in "cd":
        assert stage.deliver(stage.job(request_id, 1, seed=3)) == 0
    batches = counted(stage, monkeypatch)
    assert stage.deliver(*(stage.job(request_id, 1, seed=3) for request_id in "ab")) == 1
    assert batches == [2], "half of four"


def test_a_failure_inside_is_told_and_frees_nothing_that_is_in_use(
    stages: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stages(4, 8)
    stage.seat("r")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as broken:
        broken.setattr(stage.handlers.state.engine().layers.segments[0]._context, "decode", fail)
        stage.deliver(stage.job("r", 1))
    assert stage.refusals() == [("engine", "RuntimeError: boom")]


def test_after_lone_steps_the_daemon_is_told_in_time(stages: MakeStage) -> None:
    stage = stages(4, 8)
    assert (stage.handlers.pause_ms() or 0) > 60_000
    stage.seat("r")
    for position in range(1, 4):
        stage.deliver(stage.job("r", position))
        pause_ms = stage.handlers.pause_ms()
        assert pause_ms is not None
        assert pause_ms <= REPORT_INTERVAL_S * 1000 + 1


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("start", "end"), [(0, 4), (4, 8), (8, 12)])
def test_the_daemon_is_told_of_every_job_that_came_by_a_link(
    stages: MakeStage, start: int, end: int, alone: bool
) -> None:
    stage = stages(start, end)
    stage.seat("r")
    for position in range(1, 5):
        stage.deliver(stage.job("r", position), alone=alone)
    stage.handle(ipc.CancelRequest(id=7, request_id="r"))
    turned = [each for each in stage.said if isinstance(each, ipc.Turned)]
    assert sum(each.n_jobs for each in turned) == 4
    assert sum(each.compute_s for each in turned) > 0
    assert not turned[-1].running
