"""What one seat of the ring keeps of jobs that it cannot run as fast as they come, and what it refuses."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from node_ids import A, B

from swarmllm_proto import ipc
from swarmllm_proto.codec import decode_job, encode_job
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import LayerForward, StreamingToken
from swarmllm_proto.tensors import tensor_bytes
from swarmllm_workers.decode.decoding import Decoded
from swarmllm_workers.errors import CallError
from swarmllm_workers.ring.link import LinkClosed, ReceivingLink
from swarmllm_workers.ring.ring import Ring
from swarmllm_workers.ring.seat import SEAT_BYTES_MAX, SEAT_JOBS_MAX, Seat
from swarmllm_workers.speculation.jobs_in_flight import LaunchedJob

from .link_jobs import Jobs


def seated() -> tuple[Ring, Seat]:
    ring = Ring(lambda *_: None, Jobs(), lambda *_: None)
    ring.take_seat(
        ipc.TakeSeat(
            id=1,
            request_id="r",
            stage=1,
            start=4,
            end=12,
            before=A,
            after=B,
            origin=A,
            n_prompt_tokens=4,
        )
    )
    (seat,) = ring._seats.values()
    return ring, seat


def job(position: int, n_rows: int, n_embd: int) -> Frame:
    payload = tensor_bytes(np.zeros((n_rows, n_embd), np.float32))
    message = LayerForward(request_id="r", step="layer", stage=1, position=position, n_tokens=n_rows)
    header, pieces = encode_job(message, payload)
    return Frame(header, memoryview(bytes(pieces)))


@pytest.mark.parametrize(("n_rows", "n_embd"), [(1, 64), (64, 8192)])
def test_a_seat_holds_so_many_jobs_and_bytes_and_then_closes_the_link(n_rows: int, n_embd: int) -> None:
    ring, seat = seated()
    frame = job(4, n_rows, n_embd)
    n_max = min(SEAT_JOBS_MAX, SEAT_BYTES_MAX // len(frame.payload))
    for _ in range(n_max):
        ring._arrive(A, frame, False)
    with pytest.raises(LinkClosed, match="broke the protocol"):
        ring._arrive(A, frame, False)
    assert seat.n_bytes_waiting == n_max * len(frame.payload) <= SEAT_BYTES_MAX


def test_jobs_that_have_been_run_make_room() -> None:
    ring, seat = seated()
    for _ in range(3 * SEAT_JOBS_MAX):
        ring._arrive(A, job(4, 1, 64), False)
        ring.job_done(seat, 0.0)
    assert seat.n_bytes_waiting == 0


@pytest.mark.parametrize("kind", ["bad_message", "bad_tensor"])
def test_what_a_worker_refuses_goes_to_the_daemon_which_knows_who_sent_it(kind: str) -> None:
    """A token outside the vocabulary, or rows that are none: that is the other end's fault."""
    sent: list[Any] = []

    def refuse(*_: Any) -> None:
        raise CallError(kind, "no such token", "payload")

    ring = Ring(lambda message, *_: sent.append(message), Jobs(refuse), lambda *_: None)
    ring.take_seat(seated()[1].message)
    frame = job(4, 1, 64)
    ring._arrive(A, frame, False)
    (seat,) = ring._seats.values()
    assert [message for message in sent if not isinstance(message, ipc.Turned)] == [ipc.Arrived(sender=A)]
    assert not seat.waiting


def test_without_a_link_rows_go_through_the_daemon_where_they_may_and_else_nowhere() -> None:
    sent: list[Any] = []
    ring = Ring(lambda message, *_: sent.append(message), Jobs(), lambda *_: None)
    seat, rows = seated()[1], tensor_bytes(np.zeros((1, 64), np.float32))
    assert ring.pass_rows(seat, 4, 1, rows, (), may_relay=False) is False
    assert sent == []
    assert ring.pass_rows(seat, 4, 1, rows, (), may_relay=True) is True
    assert sent == [ipc.Relay(request_id="r", receiver=B)]


def test_a_link_that_ends_while_rows_leave_is_reported_and_not_used_again() -> None:
    sent: list[Any] = []
    ours, theirs = socket.socketpair()
    ring = Ring(lambda message, *_: sent.append(message), Jobs(), lambda *_: None)
    secret = memoryview(bytes(range(32)) + bytes(8))
    ring.take_link(ipc.TakeLink(id=1, peer=B, direction="sending"), secret, ours)
    theirs.close()
    seat, rows = seated()[1], tensor_bytes(np.zeros((1, 64), np.float32))
    assert ring.pass_rows(seat, 4, 1, rows, (), may_relay=False)
    assert [(each.peer, each.direction) for each in sent if isinstance(each, ipc.LinkLost)] == [
        (B, "sending")
    ]
    assert not ring.pass_rows(seat, 5, 1, rows, (), may_relay=False), "there is no link any more"


def test_corked_rows_leave_in_one_piece_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    ring, seat = seated()
    secret = memoryview(bytes(range(32)) + bytes(8))
    ring.take_link(ipc.TakeLink(id=1, peer=B, direction="sending"), secret, ours)
    link = ReceivingLink(theirs, secret)
    rows = tensor_bytes(np.zeros((1, 64), np.float32))
    ring.cork()
    for position in range(4, 8):
        assert ring.pass_rows(seat, position, 1, rows, (), may_relay=True)
    assert link.receive() == []
    ring.uncork()
    n_bytes = int.from_bytes(theirs.recv(2, socket.MSG_PEEK), "big")
    assert n_bytes + 2 == len(theirs.recv(65536, socket.MSG_PEEK)), "one message, which is read at once"
    jobs = [decode_job(each.header, each.payload) for each in link.receive()]
    assert [each.position for each in jobs if isinstance(each, LayerForward)] == [4, 5, 6, 7]
    assert ring.pass_rows(seat, 8, 1, rows, (), may_relay=True)
    assert len(link.receive()) == 1, "the next one leaves by itself"
    ring.close()
    theirs.close()


def test_without_corked_rows_uncorking_does_nothing() -> None:
    ring, _ = seated()
    ring.uncork()
    ring.cork()
    ring.uncork()
    ring.uncork()
    ring.close()


def test_corked_rows_whose_link_has_ended_go_through_the_daemon() -> None:
    """Each request's, marked as sent again; those to others are not touched."""
    said: list[tuple[Any, bytes]] = []
    ring = Ring(
        lambda message, payload=b"": said.append((message, bytes(payload))),
        Jobs(),
        lambda *_: None,
    )
    secret = memoryview(bytes(range(32)) + bytes(8))
    pairs = {peer: socket.socketpair() for peer in (A, B)}
    seats: dict[str, Seat] = {}
    for peer, (ours, _) in pairs.items():
        ring.take_link(ipc.TakeLink(id=1, peer=peer, direction="sending"), secret, ours)
    for request_id, after in (("r", B), ("s", B), ("t", A)):
        ring.take_seat(replace(seated()[1].message, request_id=request_id, after=after))
        seats[request_id] = ring._seats[request_id, 1]
    assert ring.n_requests == 3
    pairs[B][1].close()
    ring.cork()
    for seat in seats.values():
        assert ring.pass_rows(seat, 4, 1, tensor_bytes(np.zeros((1, 64), np.float32)), (), may_relay=True)
    ring.uncork()
    relayed = {message.request_id: payload for message, payload in said if isinstance(message, ipc.Relay)}
    assert relayed.keys() == {"r", "s"}
    for payload in relayed.values():
        (frame,) = FrameDecoder().feed(payload)
        job = decode_job(frame.header, frame.payload)
        assert isinstance(job, LayerForward)
        assert job.resent
    assert len(ReceivingLink(pairs[A][1], secret).receive()) == 1
    ring.leave("s")
    assert ring.n_requests == 2
    ring.close()
    pairs[A][1].close()


@pytest.mark.parametrize("may_relay", [True, False])
@pytest.mark.parametrize("origin", [A, B], ids=["origin elsewhere", "origin next"])
def test_a_token_goes_on_by_the_link_and_its_origin_hears_of_it(origin: NodeId, may_relay: bool) -> None:
    """By the link too where the origin is the next stage, unless a core is spare for its daemon."""
    for has_spare_core in (False, True):
        sent: list[Any] = []
        ours, theirs = socket.socketpair()
        secret = memoryview(bytes(range(32)) + bytes(8))
        ring = Ring(lambda message, *_, to=sent: to.append(message), Jobs(), lambda *_: None)
        ring.take_link(ipc.TakeLink(id=1, peer=B, direction="sending"), secret, ours)
        ring.has_spare_core = has_spare_core
        seat = seated()[1]
        seat.message = replace(seat.message, origin=origin)
        assert ring.pass_token(
            seat, Decoded(1, 7, b"x", None), (), launched=(LaunchedJob(5, (7,)),), may_relay=may_relay
        )
        came = [decode_job(each.header, each.payload) for each in ReceivingLink(theirs, secret).receive()]
        by_link = origin == B and not (may_relay and has_spare_core)
        assert [type(each) for each in came] == [*([StreamingToken] if by_link else []), LayerForward]
        told = [ipc.Relay(request_id="r", receiver=origin)] if may_relay and not by_link else []
        assert sent == told
        ring.close()
        theirs.close()
