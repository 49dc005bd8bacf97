"""The ring of a request: decode jobs that its workers pass from stage to stage by links.

The daemons assemble a pipeline, run its prompt, and give every worker a *seat* per stage. From then on a
decode job need not pass through them: it comes by a link, is computed, and leaves by a link; the last stage's
token goes straight back to the first. A seat says from whom jobs may come and to whom they go; everything
else that arrives by a link is handed to the daemon, which knows more.

Links are a short cut and never needed. Where there is none, or no more, the daemon is asked to send the job
on its own connection. A link that breaks may have swallowed what was sent last, so each seat keeps that and
has it sent again the other way, marked; a worker that had got it before recognises it by its position and
drops it. Before that, it closes the link it came by: what is still in there would be late.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from swarmllm_proto import ipc
from swarmllm_proto.codec import NO_DIGEST, decode_job, encode_job_frame
from swarmllm_proto.errors import DamagedJob, ProtocolError
from swarmllm_proto.frames import Frame, encode_frame
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import StageTiming
from swarmllm_proto.limits import SWARM_HEADER_MAX, SWARM_PAYLOAD_MAX
from swarmllm_proto.swarm import JobMessage, LayerForward, StreamingToken
from swarmllm_workers.decode.decoding import Decoded
from swarmllm_workers.errors import CallError
from swarmllm_workers.ring.link import LinkClosed, ReceivingLink, SendingLink
from swarmllm_workers.ring.seat import NO_LIMITS, Limits, Messages, Seat
from swarmllm_workers.speculation.chain_guesser import ChainGuesser
from swarmllm_workers.speculation.jobs_in_flight import LaunchedJob

log = logging.getLogger(__name__)

REPORT_INTERVAL_S: Final = 1.0
LINKS_MAX: Final = 512
"""Of both directions: twice as many as the neighbours that a node looks for."""
SEATS_MAX: Final = 1024
RINGS_MAX: Final = 256
"""Of which it is remembered what their stages take."""
_FAULTS_OF_SENDERS: Final = ("bad_message", "bad_tensor")
"""The daemon refuses such a job too, and says whose it was."""

Send = Callable[..., None]
Watch = Callable[[int, int], None]
"""(descriptor, events of `select.poll`; 0: no more)"""


class LinkJobs(Protocol):
    """Runs the decode jobs that come by links."""

    def take(
        self, seat: Seat, job: LayerForward, payload: memoryview, came_at: float, is_alone: bool
    ) -> None:
        """`came_at`: by `time.perf_counter`. `is_alone`: nothing else has come with it. Raises CallError."""


class Ring:
    def __init__(self, send: Send, jobs: LinkJobs, watch: Watch) -> None:
        self._send = send
        self._jobs = jobs
        self._watch = watch
        self._seats: dict[tuple[str, int], Seat] = {}
        self._sending: dict[NodeId, SendingLink] = {}
        self._receiving: dict[NodeId, ReceivingLink] = {}
        self._peers: dict[int, NodeId] = {}
        """Whose link a descriptor is."""
        self._corked: dict[NodeId, list[bytes]] | None = None
        """What is to leave, by receiver, while more is to come; None: it leaves at once."""
        self.n_requests = 0
        """That have seats here."""
        self._limits: dict[str, Limits] = {}
        """Of the seats of last stages, `limits_before` by the name of their ring; the newest stand last."""
        self.has_spare_core = False
        """Whether the daemons can work while all compute threads do."""

    def take_link(self, message: ipc.TakeLink, secret: memoryview, connection: socket.socket) -> None:
        try:
            if len(self._peers) >= LINKS_MAX:
                raise CallError("bad_message", f"{LINKS_MAX} links are open already", "peer")
            if message.direction == "sending":
                sending = SendingLink(connection, secret)
                self._lose_sending(message.peer, "replaced", tells_daemon=False)
                self._sending[message.peer] = sending
            else:
                receiving = ReceivingLink(connection, secret)
                self._close_receiving(message.peer)
                self._receiving[message.peer] = receiving
        except CallError:
            connection.close()
            raise
        self._peers[connection.fileno()] = message.peer
        self._watch(connection.fileno(), select.POLLIN)

    def close_links(self, peer: NodeId) -> None:
        self._close_receiving(peer)
        self._lose_sending(peer, "closed here", tells_daemon=False)

    def take_seat(
        self, message: ipc.TakeSeat, rows_max: int = 1, guesser: ChainGuesser | None = None
    ) -> None:
        if len(self._seats) >= SEATS_MAX:
            raise CallError("bad_message", f"{SEATS_MAX} seats are taken already", "request_id")
        seat = Seat.of(message, rows_max, guesser)
        if message.ring is not UNSET and message.sampling is not None:
            seat.set_limits_before(self._limits.get(message.ring, NO_LIMITS))
        self._seats[message.request_id, message.stage] = seat
        self._count()

    def leave(self, request_id: str) -> None:
        """End the request here."""
        for key in [key for key in self._seats if key[0] == request_id]:
            seat = self._seats.pop(key)
            self._remember(seat)
            if seat.guesser is not None:
                seat.guesser.close()
            if seat.n_jobs_done:
                seat.waiting.clear()
                seat.reported_at = 0.0
                self._report(seat, time.monotonic())
        self._count()

    def _remember(self, seat: Seat) -> None:
        """What the last decode job of a request said of the stages before the last one: guesses of the next
        request of the same ring need not wait for its second token."""
        name = seat.message.ring
        if name is UNSET or seat.message.sampling is None:
            return
        self._limits.pop(name, None)
        if any(seat.limits_before):
            self._limits[name] = seat.limits_before
        if len(self._limits) > RINGS_MAX:
            del self._limits[next(iter(self._limits))]

    def has_link(self, peer: NodeId) -> bool:
        """Whether results may leave for `peer` by a link."""
        return peer in self._sending

    def _count(self) -> None:
        self.n_requests = len({request_id for request_id, _ in self._seats})

    def seat(self, request_id: str, stage: int) -> Seat | None:
        return self._seats.get((request_id, stage))

    def seats_for(self, request_id: str, start: int, end: int) -> list[Seat]:
        """The request's seats for these layers."""
        return [
            seat
            for (of, _), seat in self._seats.items()
            if of == request_id and (seat.message.start, seat.message.end) == (start, end)
        ]

    def seat_of(self, message: ipc.Forward) -> Seat | None:
        """The seat for a job that the daemon has brought."""
        if message.seat is None:
            return None
        seat = self._seats.get((message.request_id, message.seat))
        if seat is None or (seat.message.start, seat.message.end) != (message.start, message.end):
            return None
        if message.resent:
            self._close_receiving(seat.message.before)
        return seat

    def job_done(self, seat: Seat, compute_s: float, n_rows: int = 1, *, is_numbered: bool = False) -> None:
        """Count a job that came by a link and has been run. The daemon gets a report of these once in
        REPORT_INTERVAL_S."""
        seat.exit(n_rows, compute_s, is_numbered=is_numbered)
        if (now := time.monotonic()) >= seat.reported_at + REPORT_INTERVAL_S:
            self._report(seat, now)

    def send_reports(self) -> int | None:
        """Send the daemon the reports that are due. Returns the milliseconds until the next one is."""
        now = time.monotonic()
        waits_s = [self._report(seat, now) for seat in self._seats.values() if seat.has_report]
        left_s = [wait_s for wait_s in waits_s if wait_s > 0]
        return int(min(left_s) * 1000) + 1 if left_s else None

    def _report(self, seat: Seat, now: float) -> float:
        """Send the report where it is due. Returns the seconds until then; 0: it has been sent."""
        wait_s = seat.reported_at + REPORT_INTERVAL_S - now
        if wait_s > 0:
            return wait_s
        seat.reported_at = now
        self._send(seat.take_report())
        return 0.0

    def pass_rows(
        self,
        seat: Seat,
        position: int,
        n_rows: int,
        payload: bytes,
        timings: tuple[StageTiming, ...],
        *,
        may_relay: bool,
        number: int | UnsetType = UNSET,
        fresh: int | UnsetType = UNSET,
    ) -> bool:
        """Send the rows in `payload` to the next stage. False: there is no link, and the daemon may not relay
        them (`may_relay`) either."""
        message = LayerForward(
            request_id=seat.message.request_id,
            step="layer",
            stage=seat.message.stage + 1,
            position=position,
            n_tokens=n_rows,
            timings=timings,
            window_rows=seat.window_rows,
            jobs_max=seat.jobs_max,
            takes_early=seat.takes_early,
            number=number,
            fresh=fresh,
            digest=NO_DIGEST,
        )
        return self._pass_on(seat, ((message, payload),), may_relay)

    def launch(self, seat: Seat, jobs: Sequence[LaunchedJob]) -> None:
        """Send jobs to the first stage before a token is there. There `has_link`."""
        self._pass_on(seat, tuple([(_embedded(seat.message.request_id, each), b"") for each in jobs]), False)

    def pass_token(
        self,
        seat: Seat,
        decoded: Decoded,
        timings: tuple[StageTiming, ...],
        *,
        launched: Sequence[LaunchedJob],
        may_relay: bool,
        before: Sequence[Decoded] = (),
    ) -> bool:
        """Tell the origin of a token, and send what was `launched` to the first stage: the token, unless it
        is the last one or on its way, and guesses. `before`: tokens of the same job that nobody has been
        told of.

        An origin that runs the first stage is told by the same link, which wakes the fewest processes,
        unless a core is spare: then its daemon hears of the token from this one's, and the first worker
        computes at once. Others are told only if this `may_relay`. False: nothing has been sent and nobody
        told.
        """
        message = seat.message
        told = _streaming_tokens(message.request_id, (*before, decoded), timings, seat.guesser)
        jobs = tuple([(_embedded(message.request_id, each), b"") for each in launched])
        if message.origin == message.after and not (may_relay and self.has_spare_core):
            return self._pass_on(seat, (*told, *jobs), may_relay)
        is_on = bool(jobs) and self._pass_on(seat, jobs, may_relay)
        if may_relay:
            # After the job: the ring waits for one, a reader for the other.
            for token, text in told:
                self._relay(message.request_id, message.origin, token, text)
        return is_on

    def cork(self) -> None:
        """Hold what is to leave by links until `uncork`."""
        self._corked = {}

    def uncork(self) -> None:
        """Send what was held, in one piece per link, so that the receiver reads it at once and runs it in one
        batch."""
        corked, self._corked = self._corked, None
        for after, pieces in (corked or {}).items():
            link = self._sending.get(after)
            if link is not None:
                self._write(after, link, b"".join(pieces))

    def on_event(self, descriptor: int, events: int, *, is_last: bool = False) -> None:
        """Handle an event on the socket of a link. `is_last`: no other event waits to be handled."""
        peer = self._peers.get(descriptor)
        if peer is None:
            return
        sending = self._sending.get(peer)
        if sending is not None and sending.connection.fileno() == descriptor:
            try:
                if events & select.POLLOUT:
                    sending.flush()
                if events & ~select.POLLOUT:
                    sending.read_end()
                self._watch_sending(sending)
            except LinkClosed as closed:
                self._lose_sending(peer, str(closed))
            return
        link = self._receiving[peer]
        try:
            n_left = len(frames := link.receive())
            for frame in frames:
                n_left -= 1
                self._arrive(peer, frame, is_last and not n_left)
        except LinkClosed as closed:
            self._close_receiving(peer)
            self._send(ipc.LinkLost(peer=peer, direction="receiving", reason=str(closed)))

    def close(self) -> None:
        for sending in self._sending.values():
            sending.connection.close()
        for receiving in self._receiving.values():
            receiving.connection.close()

    def _arrive(self, peer: NodeId, frame: Frame, is_last: bool) -> None:
        came_at = time.perf_counter()
        try:
            job = decode_job(frame.header, frame.payload)
        except DamagedJob:
            self._hand_up(peer, frame)
            return
        except ProtocolError as error:
            raise LinkClosed(f"broke the protocol ({error})") from None
        seat = self._seats.get((job.request_id, job.stage)) if isinstance(job, LayerForward) else None
        if seat is None or not isinstance(job, LayerForward) or not seat.takes(peer, job):
            self._hand_up(peer, frame)
            return
        if not seat.enter(len(frame.payload)):
            raise LinkClosed(
                f"broke the protocol (more than {len(seat.waiting)} jobs wait for request {job.request_id})"
            )
        seat.came(job, Limits(job.window_rows or 0, job.jobs_max or 0, job.takes_early is True))
        if (now := time.monotonic()) >= seat.reported_at + REPORT_INTERVAL_S:
            self._report(seat, now)
        try:
            self._jobs.take(seat, job, frame.payload, came_at, is_last)
        except CallError as error:
            seat.exit()
            if error.kind in _FAULTS_OF_SENDERS:
                self._hand_up(peer, frame)
                return
            self._send(
                ipc.Error(
                    kind=error.kind, message=error.message, field=error.field, request_id=job.request_id
                )
            )

    def _hand_up(self, peer: NodeId, frame: Frame) -> None:
        self._send(ipc.Arrived(sender=peer), _frame(frame.header, frame.payload))

    def _pass_on(self, seat: Seat, jobs: Messages, may_relay: bool) -> bool:
        after = seat.message.after
        link = self._sending.get(after)
        if link is not None:
            seat.sent(jobs)
            if self._corked is not None:
                self._corked.setdefault(after, []).append(_frames(jobs))
            else:
                self._write(after, link, _frames(jobs))
            return True
        seat.unconfirmed.clear()
        if may_relay:
            for message, payload in jobs:
                self._relay(seat.message.request_id, after, message, payload)
        return may_relay

    def _write(self, after: NodeId, link: SendingLink, frames: bytes) -> None:
        try:
            if not link.send_bytes(frames) or link.is_waiting:
                self._watch_sending(link)
        except LinkClosed as closed:
            self._lose_sending(after, str(closed))

    def _relay(
        self, request_id: str, receiver: NodeId, message: JobMessage, payload: bytes | memoryview
    ) -> None:
        self._send(ipc.Relay(request_id=request_id, receiver=receiver), encode_job_frame(message, payload))

    def _watch_sending(self, link: SendingLink) -> None:
        if link.has_unsent is not link.is_waiting:
            link.is_waiting = link.has_unsent
            events = select.POLLIN | (select.POLLOUT if link.is_waiting else 0)
            self._watch(link.connection.fileno(), events)

    def _lose_sending(self, peer: NodeId, reason: str, *, tells_daemon: bool = True) -> None:
        link = self._sending.pop(peer, None)
        if link is None:
            return
        self._forget(link.connection)
        for seat in self._seats.values():
            if seat.message.after == peer:
                self._send_again(seat)
        if tells_daemon:
            self._send(ipc.LinkLost(peer=peer, direction="sending", reason=reason))

    def _send_again(self, seat: Seat) -> None:
        unconfirmed = [each for messages in seat.unconfirmed for each in messages]
        seat.unconfirmed.clear()
        for message, payload in unconfirmed:
            if isinstance(message, LayerForward):
                message = msgspec.structs.replace(message, resent=True)
            self._relay(seat.message.request_id, seat.message.after, message, payload)

    def _close_receiving(self, peer: NodeId) -> None:
        link = self._receiving.pop(peer, None)
        if link is not None:
            self._forget(link.connection)

    def _forget(self, connection: socket.socket) -> None:
        self._watch(connection.fileno(), 0)
        self._peers.pop(connection.fileno(), None)
        connection.close()


def _embedded(request_id: str, launch: LaunchedJob) -> LayerForward:
    token, *guesses = launch.tokens
    return LayerForward(
        request_id=request_id,
        step="embed",
        stage=0,
        position=launch.position,
        n_tokens=len(launch.tokens),
        token=token,
        guesses=tuple(guesses) or UNSET,
        number=launch.number or UNSET,
        fresh=launch.fresh or UNSET,
        digest=NO_DIGEST,
    )


def _streaming_tokens(
    request_id: str,
    tokens: Sequence[Decoded],
    timings: tuple[StageTiming, ...],
    guesser: ChainGuesser | None,
) -> tuple[tuple[StreamingToken, bytes], ...]:
    """What the origin hears of the tokens of one job, which share its timings."""
    n = len(tokens)
    if n > 1:
        timings = tuple(StageTiming(each.stage, each.compute_s / n, each.busy_s / n) for each in timings)
    return tuple(
        [
            (
                StreamingToken(
                    request_id=request_id,
                    index=each.index,
                    token=each.token,
                    finish_reason=each.finish_reason,
                    timings=timings,
                    logprobs=each.logprobs,
                    stopped_by=each.stopped_by,
                    fingerprint=each.fingerprint or UNSET,
                    guessed=(guesser.n_guessed, guesser.n_right)
                    if guesser is not None and each.finish_reason is not None
                    else UNSET,
                ),
                each.text,
            )
            for each in tokens
        ]
    )


def _frame(header: bytes, payload: bytes | memoryview) -> Iterable[bytes | memoryview]:
    return encode_frame(header, payload, header_max=SWARM_HEADER_MAX, payload_max=SWARM_PAYLOAD_MAX)


def _frames(jobs: tuple[tuple[JobMessage, bytes | memoryview], ...]) -> bytes:
    if len(jobs) == 1:
        return encode_job_frame(*jobs[0])
    return b"".join([encode_job_frame(*job) for job in jobs])
