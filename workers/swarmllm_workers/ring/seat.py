"""The seat of a request at one stage of its ring: what the daemon has said of it, and how it stands."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from msgspec import UNSET, UnsetType

from swarmllm_proto import ipc
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import JOBS_UNDER_WAY_MAX
from swarmllm_proto.swarm import JobMessage, LayerForward
from swarmllm_workers.ring.job_order import JobOrder
from swarmllm_workers.speculation.chain_guesser import ChainGuesser

SEAT_JOBS_MAX: Final = 256
"""Jobs that came by a link for one seat and have not been run; an honest pipeline has a few under way."""
SEAT_BYTES_MAX: Final = 32 * 2**20
"""Of their payloads."""
_UNCONFIRMED_MAX: Final = 2 * JOBS_UNDER_WAY_MAX
"""What left more jobs ago than this has come: the last stage judges each before so many more leave."""

Messages = tuple[tuple[JobMessage, bytes | memoryview], ...]
"""Tokens and jobs that leave together, the jobs behind the tokens."""


class Limits(NamedTuple):
    """What several stages take, as jobs of theirs say."""

    n_rows: int = 0
    """Of one decode job; 0: not all of them say that they take several."""
    n_jobs: int = 0
    """Decode jobs under way at once; 0: not all of them say that several may be."""
    takes_early: bool = False
    """Decode jobs may come before the end of the prompt, and wait for it."""


NO_LIMITS: Final = Limits()


class NumberedJob(Protocol):
    def drop(self) -> None:
        """Drop the job: the token that it begins with was refused."""


@dataclass(slots=True)
class Seat:
    """A request at one stage of its ring: who may send jobs by a link, who gets the results, and the state of
    its jobs."""

    message: ipc.TakeSeat
    forward: ipc.Forward
    """What each job that comes by a link asks for, at its own position."""
    expected: int = 0
    """A job that was taken stood right before this position; none stood at it or beyond, unless it was
    numbered and may be refused."""
    order: JobOrder[NumberedJob] = field(default_factory=JobOrder)
    """Of the jobs that are numbered."""
    unconfirmed: deque[Messages] = field(default_factory=lambda: deque(maxlen=_UNCONFIRMED_MAX))
    """What left last by the link and may not have arrived; oldest first."""
    n_jobs_done: int = 0
    """Jobs since the last report to the daemon."""
    compute_s: float = 0.0
    """Spent on those with one row."""
    n_windows: int = 0
    """Of the jobs, those with several rows."""
    n_window_rows: int = 0
    n_numbered: int = 0
    """Of the jobs, those beside which others were under way."""
    reported_running: bool = False
    """Whether a job was waiting or running here, by the last report."""
    reported_at: float = 0.0
    waiting: deque[int] = field(default_factory=deque)
    """Payload bytes of each job that came by a link, or with a number, and has not been run."""
    n_bytes_waiting: int = 0
    rows_max: int = 1
    """That this stage takes in one decode job."""
    limits_before: Limits = NO_LIMITS
    """Of the stages before, by the newest job."""
    has_prompt: bool = False
    """Its rows have been computed here, or are about to be."""
    rows_at_once: int = 0
    """Of one batch, with the bits of single ones; 0: that is not known yet."""
    guesser: ChainGuesser | None = None
    """Of the last stage, where it guesses."""
    window_rows: int | UnsetType = UNSET
    """The number of rows of a window that the later stages are told."""
    jobs_max: int | UnsetType = UNSET
    """The number of jobs under way that the later stages are told."""
    takes_early: bool | UnsetType = UNSET
    """As the later stages are told."""

    def __post_init__(self) -> None:
        self._set_limits()

    @classmethod
    def of(cls, message: ipc.TakeSeat, rows_max: int = 1, guesser: ChainGuesser | None = None) -> Seat:
        forward = ipc.Forward(
            id=0,
            request_id=message.request_id,
            start=message.start,
            end=message.end,
            position=0,
            want="hidden" if message.sampling is None else "token",
            sampling=message.sampling,
            n_prompt_tokens=message.n_prompt_tokens,
            rounded=message.row_format == "q8_0",
            exact_rows=message.exact_rows,
            picture_runs=message.picture_runs,
            owner=message.owner,
        )
        return cls(message, forward, rows_max=rows_max, guesser=guesser)

    def _set_limits(self) -> None:
        """Compute `window_rows`, `jobs_max` and `takes_early`, which each job carries to the later stages and
        which rarely change."""
        is_first, before = self.message.stage == 0, self.limits_before
        n_rows = self.rows_max if is_first else min(self.rows_max, before.n_rows)
        self.window_rows = n_rows if n_rows > 1 else UNSET
        n_jobs = JOBS_UNDER_WAY_MAX if is_first else min(before.n_jobs, JOBS_UNDER_WAY_MAX)
        self.jobs_max = n_jobs if self.rows_max > 1 and n_jobs > 1 else UNSET
        self.takes_early = is_first or before.takes_early or UNSET

    def set_limits_before(self, limits: Limits) -> None:
        self.limits_before = limits
        self._set_limits()

    def came(self, job: LayerForward | ipc.Forward, limits_before: Limits = NO_LIMITS) -> None:
        """Record that a job was accepted."""
        if job.number is UNSET or job.number == job.fresh:
            # Of the others, all rows may be refused: the next job may stand before them.
            self.expected = job.position + 1
        # A piece of the prompt, which daemons bring, says nothing of windows.
        if limits_before != self.limits_before and job.position >= self.message.n_prompt_tokens:
            self.set_limits_before(limits_before)

    def sent(self, messages: Messages) -> None:
        """Record the results that left by a link."""
        unconfirmed, last = self.unconfirmed, messages[-1][0]
        # Jobs stand behind tokens, and of several ones each has a number.
        if isinstance(last, LayerForward):
            is_alone = last.number is UNSET
        else:
            is_alone = self.guesser is None or not self.guesser.jobs_in_flight.n_under_way
        if is_alone:
            # No other job is under way, so what left up to the last one has come.
            for n_after, earlier in enumerate(reversed(unconfirmed)):
                if isinstance(earlier[-1][0], LayerForward):
                    while len(unconfirmed) > n_after:
                        unconfirmed.popleft()
                    break
        unconfirmed.append(messages)

    def enter(self, n_bytes: int) -> bool:
        """Queue a job. False: the queue is full."""
        if len(self.waiting) >= SEAT_JOBS_MAX or self.n_bytes_waiting + n_bytes > SEAT_BYTES_MAX:
            return False
        self.waiting.append(n_bytes)
        self.n_bytes_waiting += n_bytes
        return True

    def exit(self, n_rows: int = 0, compute_s: float = 0.0, *, is_numbered: bool = False) -> None:
        """Remove the oldest job from the queue: `n_rows` of it were computed in `compute_s`; 0: it was
        refused or dropped."""
        if self.waiting:
            self.n_bytes_waiting -= self.waiting.popleft()
        if not n_rows:
            return
        self.n_jobs_done += 1
        self.n_numbered += is_numbered
        if n_rows > 1:
            self.n_windows += 1
            self.n_window_rows += n_rows
        else:
            self.compute_s += compute_s

    @property
    def has_report(self) -> bool:
        return bool(self.n_jobs_done) or bool(self.waiting) is not self.reported_running

    def take_report(self) -> ipc.Turned:
        """The report for the daemon; its counts start at 0 afterwards."""
        is_running = bool(self.waiting)
        report = ipc.Turned(
            request_id=self.message.request_id,
            stage=self.message.stage,
            n_jobs=self.n_jobs_done,
            compute_s=self.compute_s,
            running=is_running,
            n_windows=self.n_windows or UNSET,
            n_window_rows=self.n_window_rows or UNSET,
            n_numbered=self.n_numbered or UNSET,
        )
        self.n_jobs_done, self.compute_s, self.reported_running = 0, 0.0, is_running
        self.n_windows = self.n_window_rows = self.n_numbered = 0
        return report

    def takes(self, sender: NodeId, job: LayerForward) -> bool:
        """Whether this is a decode job that `sender` may send to this seat."""
        step = "layer" if self.message.stage else "embed"
        return (
            sender == self.message.before
            and job.step == step
            and job.prefill_left == 0
            and job.position >= self.message.n_prompt_tokens
            and len(job.timings) <= job.stage
        )
