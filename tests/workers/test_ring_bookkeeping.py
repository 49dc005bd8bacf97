"""What a ring tells its daemon and when, whose links and seats it has, and what it does with what arrives."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace
from node_ids import A, B, C

from swarmllm_proto import ipc
from swarmllm_proto.codec import decode_job, encode_job_frame
from swarmllm_proto.frames import FrameDecoder, encode_frame
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import LayerForward
from swarmllm_proto.tensors import tensor_bytes
from swarmllm_workers.errors import CallError
from swarmllm_workers.ring import ring as ring_module
from swarmllm_workers.ring.link import ReceivingLink, SendingLink
from swarmllm_workers.ring.ring import REPORT_INTERVAL_S, RINGS_MAX, SEATS_MAX, Ring
from swarmllm_workers.ring.seat import NO_LIMITS, Limits, Seat

from .link_jobs import Jobs

SECRET = memoryview(bytes(range(32)) + bytes(8))
ROW = tensor_bytes(np.zeros((1, 64), np.float32))


@dataclass
class Clock:
    now_s: float = 1000.0

    def time(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def clock() -> Iterator[Clock]:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        times = SimpleNamespace(monotonic=clock.time, perf_counter=clock.time)
        patch.setattr(ring_module, "time", times)
        yield clock


class Worker:
    """A ring, what it said to its daemon, and the other ends of its links."""

    def __init__(self, refuse: CallError | None = None) -> None:
        self.said: list[Any] = []
        self.payloads: list[bytes] = []
        self.taken: list[tuple[Seat, LayerForward, bool]] = []
        self.watched: dict[int, int] = {}
        self._refuse = refuse
        self.ring = Ring(self._send, Jobs(self._take), self.watched.__setitem__)
        self._descriptors: dict[NodeId, int] = {}
        self._sockets: list[socket.socket] = []

    def _send(self, message: Any, pieces: Any = b"") -> None:
        self.said.append(message)
        self.payloads.append(pieces if isinstance(pieces, bytes) else b"".join(pieces))

    def _take(self, seat: Seat, job: LayerForward, payload: memoryview, at: float, is_last: bool) -> None:
        if self._refuse is not None:
            raise self._refuse
        self.taken.append((seat, job, is_last))

    def sender(self, peer: NodeId) -> SendingLink:
        """The end from which `peer` sends to this worker."""
        return SendingLink(self.take_link(peer, "receiving"), SECRET)

    def take_link(self, peer: NodeId, direction: Any, secret: memoryview = SECRET) -> socket.socket:
        """The other end."""
        ours, theirs = socket.socketpair()
        self._sockets += (ours, theirs)
        descriptor = ours.fileno()
        self.ring.take_link(ipc.TakeLink(id=1, peer=peer, direction=direction), secret, ours)
        self._descriptors[peer] = descriptor
        return theirs

    def read(self, peer: NodeId, *, is_last: bool = True) -> None:
        """As when the socket of the newest link with `peer` can be read."""
        self.ring.on_event(self._descriptors[peer], select.POLLIN, is_last=is_last)

    def seat(self, request_id: str = "r", **changed: Any) -> None:
        fields = {"stage": 1, "start": 4, "end": 12, "before": A, "after": B, "origin": C}
        fields |= {"n_prompt_tokens": 4} | changed
        self.ring.take_seat(ipc.TakeSeat(id=1, request_id=request_id, **fields))

    def turned(self) -> list[ipc.Turned]:
        return [each for each in self.said if isinstance(each, ipc.Turned)]

    def close(self) -> None:
        self.ring.close()
        for each in self._sockets:
            each.close()


@pytest.fixture
def workers(clock: Clock) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(refuse: CallError | None = None) -> Worker:
        made.append(Worker(refuse))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def job(position: int = 4, request_id: str = "r", **changed: Any) -> LayerForward:
    fields = {"step": "layer", "stage": 1, "position": position, "n_tokens": 1} | changed
    return LayerForward(request_id=request_id, **fields)


BROUGHT = ipc.Forward(id=1, request_id="r", start=4, end=12, position=4, want="hidden", seat=1)
"""A job for the seat of `Worker.seat` that its daemon brings."""

ACTIONS = st.lists(
    st.one_of(
        st.just("arrive"),
        st.just("done"),
        st.just("tell"),
        st.sampled_from([0.0, 0.25, 0.5, 0.999, 1.0, 3.0]),
    ),
    max_size=30,
)


@given(ACTIONS)
def test_the_daemon_hears_of_every_job_once_and_at_most_once_an_interval(
    clock: Clock, actions: list[str | float]
) -> None:
    """And of the truth once the time comes that `send_reports` names; without news it hears nothing."""
    worker = Worker()
    worker.seat()
    link, position, n_turned = worker.sender(A), 4, 0
    moments: list[float] = []

    def moved(n_before: int) -> None:
        moments.extend(clock.now_s for _ in worker.turned()[n_before:])

    try:
        for action in actions:
            n_before = len(worker.turned())
            match action:
                case "arrive":
                    link.send_bytes(encode_job_frame(job(position), ROW))
                    worker.read(A)
                    position += 1
                case "done" if len(worker.taken) > n_turned:
                    worker.ring.job_done(worker.taken[n_turned][0], 0.5)
                    n_turned += 1
                case "tell":
                    worker.ring.send_reports()
                case float():
                    clock.now_s += action
            moved(n_before)
        for _ in range(2):
            n_before = len(worker.turned())
            wait_ms = worker.ring.send_reports()
            moved(n_before)
            if wait_ms is not None:
                assert 0 < wait_ms <= REPORT_INTERVAL_S * 1000 + 1
                clock.now_s += wait_ms / 1000
        n_before = len(worker.turned())
        assert worker.ring.send_reports() is None
        clock.now_s += 2 * REPORT_INTERVAL_S
        assert worker.ring.send_reports() is None
        told = worker.turned()
        assert len(told) == n_before, "there was nothing to say"
        assert sum(each.n_jobs for each in told) == n_turned
        assert sum(each.compute_s for each in told) == n_turned * 0.5
        assert all((each.request_id, each.stage) == ("r", 1) for each in told)
        if told:
            assert told[-1].running is is_running_after(actions)
        assert all(b - a >= REPORT_INTERVAL_S - 1e-6 for a, b in pairwise(moments))
    finally:
        worker.close()


def is_running_after(actions: list[str | float]) -> bool:
    """Whether a job has come that was not run."""
    n_waiting = 0
    for action in actions:
        if action == "arrive":
            n_waiting += 1
        elif action == "done" and n_waiting:
            n_waiting -= 1
    return n_waiting > 0


def test_a_job_that_is_dropped_is_not_under_way_any_more(
    workers: Callable[..., Worker], clock: Clock
) -> None:
    worker = workers()
    worker.seat()
    link = worker.sender(A)
    for position in (4, 5):
        link.send_bytes(encode_job_frame(job(position), ROW))
        worker.read(A)
    for is_running in (True, False):
        worker.taken.pop()[0].exit()
        clock.now_s += REPORT_INTERVAL_S
        worker.ring.send_reports()
        assert worker.turned()[-1].running is is_running


def test_a_request_that_ends_is_counted_to_its_last_job(workers: Callable[..., Worker], clock: Clock) -> None:
    worker = workers()
    worker.seat()
    worker.seat("other")
    link = worker.sender(A)
    for position in range(4, 7):
        link.send_bytes(encode_job_frame(job(position), ROW))
        worker.read(A)
        worker.ring.job_done(worker.taken[-1][0], 0.5)
    worker.ring.leave("r")
    assert sum(each.n_jobs for each in worker.turned()) == 3
    assert not worker.turned()[-1].running
    n_said = len(worker.said)
    worker.ring.leave("r")
    worker.ring.leave("other")
    assert len(worker.said) == n_said, "nothing is told of a seat of which nothing is new"
    assert worker.ring.n_requests == 0


def test_only_the_last_of_several_jobs_is_called_the_last(workers: Callable[..., Worker]) -> None:
    worker = workers()
    worker.seat()
    link = worker.sender(A)
    for is_last in (True, False):
        link.send_bytes(b"".join(encode_job_frame(job(position), ROW) for position in range(4, 7)))
        worker.read(A, is_last=is_last)
        assert [last for _, _, last in worker.taken] == [False, False, is_last]
        worker.taken.clear()


@pytest.mark.parametrize(
    ("changed", "is_taken"),
    [
        ({}, True),
        ({"position": 3}, False),
        ({"stage": 2}, False),
        ({"request_id": "s"}, False),
        ({"prefill_left": 1}, False),
        ({"step": "embed"}, False),
        ({"timings": (ipc.StageTiming(0, 0.1, 0.1),)}, True),
        ({"timings": (ipc.StageTiming(0, 0.1, 0.1),) * 2}, False),
    ],
)
def test_a_seat_takes_the_decode_jobs_of_the_node_before_it(
    workers: Callable[..., Worker], changed: dict[str, Any], is_taken: bool
) -> None:
    """What no seat takes goes to the daemon as it came."""
    worker = workers()
    worker.seat()
    sent = encode_job_frame(replace(job(), **changed), ROW)
    worker.sender(A).send_bytes(sent)
    worker.read(A)
    assert bool(worker.taken) is is_taken
    arrived = [
        (each, payload)
        for each, payload in zip(worker.said, worker.payloads, strict=True)
        if isinstance(each, ipc.Arrived)
    ]
    assert arrived == ([] if is_taken else [(ipc.Arrived(sender=A), sent)])


def test_a_job_of_another_node_than_the_one_before_goes_to_the_daemon(workers: Callable[..., Worker]) -> None:
    worker = workers()
    worker.seat()
    worker.sender(C).send_bytes(encode_job_frame(job(), ROW))
    worker.read(C)
    assert worker.taken == []
    assert worker.said == [ipc.Arrived(sender=C)]


def test_a_first_stage_takes_tokens_and_no_rows(workers: Callable[..., Worker]) -> None:
    worker = workers()
    worker.seat(stage=0, start=0)
    link = worker.sender(A)
    link.send_bytes(encode_job_frame(job(stage=0, step="embed", token=7), b""))
    link.send_bytes(encode_job_frame(job(stage=0), ROW))
    worker.read(A)
    assert [each.step for _, each, _ in worker.taken] == ["embed"]
    assert [each for each in worker.said if isinstance(each, ipc.Arrived)] == [ipc.Arrived(sender=A)]


@pytest.mark.parametrize("kind", ["engine", "bad_tensor"])
def test_a_job_that_cannot_be_run_is_told_and_makes_room(
    workers: Callable[..., Worker], clock: Clock, kind: str
) -> None:
    worker = workers(CallError(kind, "no room", "position"))
    worker.seat()
    link = worker.sender(A)
    link.send_bytes(encode_job_frame(job(), ROW))
    worker.read(A)
    others = [each for each in worker.said if not isinstance(each, ipc.Turned)]
    error = ipc.Error(kind="engine", message="no room", field="position", request_id="r")
    assert others == [error if kind == "engine" else ipc.Arrived(sender=A)]
    assert worker.turned()[-1].running
    clock.now_s += REPORT_INTERVAL_S
    worker.ring.send_reports()
    assert [each.running for each in worker.turned()] == [True, False]


def test_a_last_stage_remembers_what_the_stages_of_a_ring_take(workers: Callable[..., Worker]) -> None:
    worker = workers()
    link = worker.sender(A)

    def limits(request_id: str, *, ring: Any = UNSET, **said: Any) -> Limits:
        """Of its seat, before its first job by a link."""
        worker.seat(request_id, sampling=ipc.Sampling(), ring=ring)
        seat = worker.ring.seat(request_id, 1)
        assert seat is not None
        seat.came(replace(BROUGHT, position=3))
        found = seat.limits_before
        link.send_bytes(encode_job_frame(job(request_id=request_id, **said), ROW))
        worker.read(A)
        worker.ring.leave(request_id)
        return found

    takes = {"window_rows": 16, "jobs_max": 12, "takes_early": True}
    assert limits("a", **takes) == NO_LIMITS
    assert limits("b", ring="x", **takes) == NO_LIMITS, "the one before named no ring"
    assert limits("c", ring="y", **takes) == NO_LIMITS
    assert limits("d", ring="x") == (16, 12, True), "a piece of the prompt has changed nothing"
    assert limits("e", ring="x", **takes) == NO_LIMITS, "it said that they take no windows"
    assert limits("f", ring="x", **takes | {"takes_early": False}) == (16, 12, True)
    assert limits("g", ring="x", **takes) == (16, 12, False)
    worker.seat("h", ring="x", stage=0, start=0, end=4)
    first = worker.ring.seat("h", 0)
    assert first is not None
    assert first.limits_before == NO_LIMITS, "it is not the last one"
    for number in range(RINGS_MAX):
        limits(f"of {number}", ring=f"ring {number}", **takes)
    assert limits("i", ring="x") == NO_LIMITS, "too many were newer"


def test_a_daemon_that_brings_a_decode_job_knows_of_no_windows(workers: Callable[..., Worker]) -> None:
    worker = workers()
    worker.seat()
    seat = worker.ring.seat("r", 1)
    assert seat is not None
    seat.set_limits_before(Limits(16, 16, takes_early=True))
    seat.came(BROUGHT)
    assert seat.limits_before == NO_LIMITS


def test_nonsense_ends_the_link_by_which_it_came(workers: Callable[..., Worker]) -> None:
    worker = workers()
    worker.seat()
    link = worker.sender(A)
    link.send(encode_frame(b"nonsense", b""))
    worker.read(A)
    (lost,) = worker.said
    assert isinstance(lost, ipc.LinkLost)
    assert (lost.peer, lost.direction) == (A, "receiving")
    assert "broke the protocol" in lost.reason
    assert link.connection.recv(1) == b"", "it is closed"
    assert set(worker.watched.values()) == {0}
    worker.read(A)
    assert len(worker.said) == 1, "its descriptor means nothing any more"


def test_a_new_link_replaces_the_old_one_and_nobody_need_hear_of_it(workers: Callable[..., Worker]) -> None:
    worker = workers()
    worker.seat()
    for direction in ("sending", "receiving"):
        old, new = (worker.take_link(B, direction) for _ in range(2))
        assert old.recv(1) == b""
        new.setblocking(False)
        with pytest.raises(BlockingIOError):
            new.recv(1)
    assert worker.said == []
    assert sorted(filter(None, worker.watched.values())) == [select.POLLIN, select.POLLIN]
    worker.ring.close_links(B)
    assert worker.said == []
    assert new.recv(1) == b""
    assert set(worker.watched.values()) == {0}


def test_what_left_last_by_a_link_that_is_closed_is_sent_again_through_the_daemon(
    workers: Callable[..., Worker],
) -> None:
    worker = workers()
    worker.seat()
    worker.seat("s", after=C)
    seats = {}
    for request_id in "rs":
        seats[request_id] = worker.ring.seat_of(replace(BROUGHT, request_id=request_id))
    for peer in (B, C):
        worker.take_link(peer, "sending")
    for position in (4, 5):
        for seat in seats.values():
            assert seat is not None
            assert worker.ring.pass_rows(seat, position, 1, ROW, (), may_relay=False)
    worker.ring.close_links(B)
    assert worker.said == [ipc.Relay(request_id="r", receiver=B)]
    (frame,) = FrameDecoder().feed(worker.payloads[0])
    again = decode_job(frame.header, frame.payload)
    assert isinstance(again, LayerForward)
    assert (again.stage, again.position, again.resent) == (2, 5, True)
    worker.ring.close_links(B)
    assert len(worker.said) == 1, "once is enough"
    assert not worker.ring.pass_rows(seats["r"], 6, 1, ROW, (), may_relay=False)  # type: ignore[arg-type]


def test_a_job_that_the_daemon_brings_finds_its_own_seat(workers: Callable[..., Worker]) -> None:
    worker = workers()
    worker.seat()
    assert worker.ring.seat_of(BROUGHT) is not None
    for changed in ({"seat": None}, {"seat": 0}, {"start": 3}, {"end": 11}, {"request_id": "s"}):
        assert worker.ring.seat_of(replace(BROUGHT, **changed)) is None


def test_a_job_that_is_sent_again_ends_the_link_by_which_it_may_still_come(
    workers: Callable[..., Worker],
) -> None:
    worker = workers()
    worker.seat()
    link, other = worker.sender(A), worker.sender(C)
    worker.ring.seat_of(BROUGHT)
    link.connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        link.connection.recv(1)
    worker.ring.seat_of(replace(BROUGHT, resent=True))
    assert link.connection.recv(1) == b""
    with pytest.raises(BlockingIOError):
        other.connection.recv(1)


def test_links_and_seats_are_bounded_and_a_refused_link_is_closed(
    workers: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_module, "LINKS_MAX", 2)
    worker = workers()
    for i in range(SEATS_MAX):
        worker.seat(f"r{i}")
    with pytest.raises(CallError) as refused:
        worker.seat("one more")
    assert refused.value.field == "request_id"
    worker.ring.leave("r0")
    worker.seat("one more")
    for secret, field in ((SECRET[1:], "payload"), (SECRET, "peer")):
        if field == "peer":
            worker.take_link(B, "sending")
            worker.take_link(B, "receiving")
        ours, theirs = socket.socketpair()
        with pytest.raises(CallError) as refused:
            worker.ring.take_link(ipc.TakeLink(id=1, peer=A, direction="receiving"), secret, ours)
        assert refused.value.field == field
        assert theirs.recv(1) == b""
        theirs.close()


def test_a_neighbour_that_does_not_read_is_watched_until_it_has_read(workers: Callable[..., Worker]) -> None:
    worker = workers()
    worker.seat()
    receiving = worker.take_link(B, "sending")
    (descriptor,) = worker.watched
    seat = worker.ring.seat_of(BROUGHT)
    assert seat is not None
    rows = tensor_bytes(np.zeros((64, 4096), np.float32))
    while worker.watched[descriptor] == select.POLLIN:
        assert worker.ring.pass_rows(seat, 4, 64, rows, (), may_relay=False)
    assert worker.watched[descriptor] == select.POLLIN | select.POLLOUT
    link, n_jobs = ReceivingLink(receiving, SECRET), 0
    for _ in range(1000):
        n_jobs += len(link.receive())
        worker.ring.on_event(descriptor, select.POLLOUT)
        if worker.watched[descriptor] == select.POLLIN:
            break
    assert worker.watched[descriptor] == select.POLLIN
    for _ in range(100):
        n_jobs += len(link.receive())
    assert n_jobs >= 1
    assert worker.said == []
    receiving.send(b"x")
    worker.ring.on_event(descriptor, select.POLLIN)
    (lost,) = worker.said[-1:]
    assert isinstance(lost, ipc.LinkLost)
    assert (lost.peer, lost.direction) == (B, "sending")
