"""Checks Forwards of the daemon and decode jobs of links, and gives them to the scheduler as works."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import numpy as np
from msgspec import UNSET

from swarmllm_proto import ipc
from swarmllm_proto.picture_runs import has_grid, require_order
from swarmllm_proto.swarm import LayerForward
from swarmllm_proto.tensors import unpack_rows
from swarmllm_workers.decode.decoding import Decoding
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.errors import CallError
from swarmllm_workers.payloads import check_hidden, check_tokens, read_as, read_tensor
from swarmllm_workers.ring.ring import Ring
from swarmllm_workers.ring.seat import NumberedJob, Seat
from swarmllm_workers.schedule.cohorts import Cohorts
from swarmllm_workers.schedule.joined_work import JoinedWork
from swarmllm_workers.schedule.lone_steps import LoneSteps
from swarmllm_workers.schedule.resample_work import ResampleWork
from swarmllm_workers.schedule.ring_work import RingWork, early_jobs
from swarmllm_workers.schedule.scheduler import Scheduler
from swarmllm_workers.schedule.thread_use import ThreadUse
from swarmllm_workers.schedule.window_work import WindowRows, WindowWork, is_window
from swarmllm_workers.schedule.work import ForwardWork, Send, Work

SLEPT_S: Final = 0.0005
"""A poll of the sockets that took longer than this has slept: nothing ran until the job came."""


class Forwards:
    def __init__(
        self,
        send: Send,
        fail: Callable[[int, Exception, str], None],
        decodings: dict[str, Decoding],
        thread_use: ThreadUse,
    ) -> None:
        """`fail`: answers a call (0: none) of a request with an error."""
        self._send = send
        self._fail = fail
        self._decodings = decodings
        self._thread_use = thread_use
        self._engine: Engine
        self._scheduler: Scheduler
        self._ring: Ring
        self._lone_steps: LoneSteps
        self._windows: WindowRows
        self.polled_at_s = 0.0
        """When the worker looked at its sockets, by `time.perf_counter`."""
        self.has_run_alone = False
        """Nothing but lone steps has happened since the worker looked at everything else."""

    def open(self, engine: Engine, scheduler: Scheduler, ring: Ring, cohorts: Cohorts | None) -> None:
        """Set the engine of the open model, before anything is added or taken."""
        self._engine = engine
        self._scheduler = scheduler
        self._ring = ring
        self._lone_steps = LoneSteps(engine, self._decodings, ring, cohorts)
        self._windows = WindowRows(engine)

    def add(self, message: ipc.Forward, payload: memoryview, arrived_at: float) -> None:
        """Add a Forward of the daemon. Raises CallError."""
        data = read_tensor(payload)
        self._check(message, message.position, data)
        seat = self._ring.seat_of(message)
        if seat is None:
            make = ResampleWork if message.want == "again" else ForwardWork
            work = make(message, message.position, data, self._engine, self._decodings, self._send)
        elif message.resent and message.number is UNSET and message.position < seat.expected:
            self._send(ipc.Done(id=message.id))
            return
        else:
            seat.came(message)
            since = arrived_at - message.waited_s
            if message.number is not UNSET:
                if not seat.enter(data.nbytes):
                    raise CallError("no_room", f"{len(seat.waiting)} jobs wait for the request", "seat")
                self._take_in_turn(message, message.position, data, seat, since, message.timings)
                self._send(ipc.Done(id=message.id))
                return
            if message.position >= seat.message.n_prompt_tokens:
                self._drop(seat.order.came_alone())
            work = self._ring_work(message, message.position, data, seat, since, message.timings)
        if message.position < message.n_prompt_tokens <= message.position + len(data):
            self._add_end_of_prompt(work, message)
        else:
            self._scheduler.add(work)

    def launch_early(self, seat: Seat) -> None:
        """At the last stage, which has just been told a prompt that nothing was generated of: send the answer
        that the prompt had before, so that it follows the prompt's rows from stage to stage."""
        message = seat.message
        if message.request_id in self._decodings:
            return
        route = self._engine.known_route(message.request_id, message.start, message.end)
        seat.rows_at_once = (route and self._windows.n_exact(route)) or 0
        jobs = early_jobs(self._ring, seat)
        if jobs:
            self._ring.launch(seat, jobs)

    def _add_end_of_prompt(self, work: ForwardWork, message: ipc.Forward) -> None:
        """Jobs that came before the prompt's last rows run behind them, the first one with them where the
        bits are the same."""
        early: list[WindowWork] = []
        for seat in self._ring.seats_for(message.request_id, message.start, message.end):
            seat.has_prompt = True
            for each in seat.order.go_on():
                assert isinstance(each, WindowWork)
                early.append(each)
        route = self._engine.known_route(message.request_id, message.start, message.end) if early else None
        n_exact = (route and self._windows.n_exact(route)) or 0
        # Another node embeds a prompt itself, and sends rows where tokens follow.
        is_alike = bool(early) and work.has_tokens is early[0].has_tokens
        if is_alike and work.n_rows < n_exact and not message.picture_runs:
            self._scheduler.add(JoinedWork(work, early.pop(0), n_exact))
        else:
            self._scheduler.add(work)
        for window in early:
            self._scheduler.add(window)

    def _has_prompt(self, seat: Seat) -> bool:
        """Whether the rows of the whole prompt are here, or will be before what is added now."""
        if not seat.has_prompt:
            message = seat.message
            works = self._scheduler.of_request(message.request_id)
            layers = message.start, message.end
            ends = [
                work.end_position for work in works if isinstance(work, ForwardWork) and work.layers == layers
            ]
            n_rows = self._engine.n_rows(message.request_id, *layers)
            seat.has_prompt = max(n_rows, *ends, 0) >= message.n_prompt_tokens
        return seat.has_prompt

    def take(
        self, seat: Seat, job: LayerForward, payload: memoryview, came_at: float, is_alone: bool
    ) -> None:
        """Take a decode job that came by a link. Where it has the worker to itself, it runs at once.
        `is_alone`: no other job has come with it. Raises CallError."""
        if job.number is not UNSET:
            data = self._link_data(seat, job, payload)
            self._take_in_turn(job, job.position, data, seat, came_at, job.timings)
            return
        if seat.order.fresh:
            self._drop(seat.order.came_alone())
        is_idle = came_at - self.polled_at_s > SLEPT_S
        if is_alone and not self._scheduler.works and self._run_alone(seat, job, payload, came_at, is_idle):
            return
        self._scheduler.add(self._link_work(seat, job, payload, came_at), is_idle=is_idle)

    def _run_alone(
        self, seat: Seat, job: LayerForward, payload: memoryview, came_at: float, is_idle: bool
    ) -> bool:
        try:
            has_run = self._lone_steps.run(seat, job, payload, came_at, is_idle=is_idle)
        except Exception as error:
            self._engine.release_if_empty(job.request_id)
            self._fail(0, error, job.request_id)
            return True
        if has_run:
            self.has_run_alone = True
            self._thread_use.stepped()
        return has_run

    def _take_in_turn(
        self,
        job: ipc.Forward | LayerForward,
        position: int,
        data: np.ndarray,
        seat: Seat,
        since: float,
        timings: tuple[ipc.StageTiming, ...],
    ) -> None:
        """A job beside which others of the request may be under way. It has entered its seat."""
        assert job.number is not UNSET
        assert job.fresh is not UNSET
        of = (seat.forward, position, data, self._engine, self._decodings, self._send, self._ring)
        work = WindowWork(
            self._windows,
            *of,
            seat,
            since,
            timings,
            by_link=True,
            number=job.number,
            fresh=job.fresh,
            drop_refused=self._drop_refused,
        )
        fresh = job.fresh
        if seat.message.sampling is not None:
            # The last stage knows what it has sent, and believes nothing else.
            jobs_in_flight = seat.guesser.jobs_in_flight if seat.guesser is not None else None
            launch = (
                jobs_in_flight.find(position, len(data), job.number) if jobs_in_flight is not None else None
            )
            if launch is None:
                work.drop()
                return
            fresh = launch.fresh
        ready, dropped = seat.order.take(job.number, fresh, work, waits=not self._has_prompt(seat))
        self._drop(dropped)
        self._drop_refused(seat)
        for each in ready:
            assert isinstance(each, WindowWork)
            self._scheduler.add(each)

    def _drop(self, works: Iterable[NumberedJob]) -> None:
        for work in works:
            work.drop()

    def _drop_refused(self, seat: Seat) -> None:
        for work in self._scheduler.of_request(seat.message.request_id):
            window = work.window if isinstance(work, JoinedWork) else work
            if isinstance(window, WindowWork) and window.is_at(seat) and window.is_refused:
                window.drop()

    def _link_work(self, seat: Seat, job: LayerForward, payload: memoryview, came_at: float) -> Work:
        data = self._link_data(seat, job, payload)
        return self._ring_work(seat.forward, job.position, data, seat, came_at, job.timings, by_link=True)

    def _link_data(self, seat: Seat, job: LayerForward, payload: memoryview) -> np.ndarray:
        if job.step == "embed":
            data = np.array([job.token, *(job.guesses or ())], np.int32)
        else:
            width = self._engine.n_embd
            data = read_as(lambda: unpack_rows(payload, n_rows=job.n_tokens, width=width, field="payload"))
        self._check(seat.forward, job.position, data)
        if len(data) != job.n_tokens:
            raise CallError("bad_tensor", f"{len(data)} rows where {job.n_tokens} are due", "n_tokens")
        return data

    def _ring_work(
        self,
        message: ipc.Forward,
        position: int,
        data: np.ndarray,
        seat: Seat,
        since: float,
        timings: tuple[ipc.StageTiming, ...],
        *,
        by_link: bool = False,
    ) -> RingWork:
        make: Callable[..., RingWork] = RingWork
        if is_window(seat, position, len(data)):
            make = partial(WindowWork, self._windows)
        of = (message, position, data, self._engine, self._decodings, self._send, self._ring)
        return make(*of, seat, since, timings, by_link=by_link, drop_refused=self._drop_refused)

    def _check(self, message: ipc.Forward, position: int, data: np.ndarray) -> None:
        """That it is f32 [n, n_embd] or i32 [n], n at least 1, and fit for the message. Raises CallError."""
        engine = self._engine
        check_exact(message)
        if data.dtype == np.int32:
            if message.start != 0:
                raise CallError(
                    "bad_tensor", "token ids enter at layer 0, hidden states everywhere else", "payload"
                )
            check_tokens(engine, data)
        else:
            takes_parts = message.start == 0 and has_grid(message.picture_runs, position, len(data))
            check_hidden(data, engine.n_embd_input if takes_parts else engine.n_embd)
        if len(data) == 0:
            raise CallError("bad_tensor", "at least one row is needed", "payload")
        if message.picture_runs:
            self._check_runs(message, position, len(data))
        if position + len(data) > engine.settings.n_ctx:
            raise CallError(
                "context_full",
                f"position {position} and {len(data)} rows exceed the context of "
                f"{engine.settings.n_ctx} (n_ctx)",
                "position",
            )
        if message.want == "hidden" and message.end >= engine.n_layers:
            raise CallError("bad_message", "the last layer leads to the head, which gives tokens", "want")
        if message.want not in ("hidden", "none") and message.end != engine.n_layers:
            raise CallError(
                "bad_message",
                f"only the range that ends at {engine.n_layers} gives tokens, scores and normed states",
                "want",
            )
        if len(message.scored) != (len(data) if message.want in ("scores", "again") else 0):
            raise CallError("bad_message", f"{len(message.scored)} tokens for {len(data)} rows", "scored")
        if message.scored and max(message.scored) >= engine.n_vocab:
            raise CallError("bad_message", f"token ids lie in [0, {engine.n_vocab})", "scored")
        if message.want == "token" and position + len(data) < message.n_prompt_tokens:
            raise CallError(
                "bad_message", "a token is wanted before the end of the prompt", "n_prompt_tokens"
            )

    def _check_runs(self, message: ipc.Forward, position: int, n_rows: int) -> None:
        """Raises CallError bad_message, also where rows that see each other come one part after the other."""
        field = "picture_runs"
        try:
            require_order(message.picture_runs, self._engine.settings.n_ctx)
        except ValueError as error:
            raise CallError("bad_message", str(error), field) from None
        if message.exact_rows or message.want in ("normed", "scores", "again"):
            raise CallError("bad_message", "with pictures that are no plain rows, tokens are wanted", field)
        is_on_grid = any(run.grid_width for run in message.picture_runs)
        if is_on_grid and not self._engine.has_grid_positions:
            raise CallError("bad_message", "rows of this model have one position each", field)
        whole = [run for run in message.picture_runs if not run.is_causal]
        if whole and self._engine.is_recurrent:
            raise CallError("bad_message", "no row of this model sees those behind it", field)
        for run in whole:
            if run.first_row < position < run.end or run.first_row < position + n_rows < run.end:
                raise CallError(
                    "bad_message",
                    f"rows {run.first_row}:{run.end} see each other, and come in one piece",
                    "position",
                )


def check_exact(message: ipc.Forward | ipc.TakeSeat) -> None:
    """Raises CallError bad_message."""
    if message.sampling is not None and message.sampling.exact != (message.exact_rows > 0):
        wanted = "above 0" if message.sampling.exact else "0"
        raise CallError("bad_message", f"{wanted} where sampling.exact says so", "exact_rows")
