"""The decode jobs that the head of a cut model has under way for one request: pure.

Where guesses are often right, the head sends the next job before the one before it is back. A job is then
numbered, and its rows follow those of the job before it. What the head samples from a job's last row is to be
the first token of the next job. Where it is another one, or a guess within a job was wrong, every job that is
under way has been refused: it comes back, or a stage drops it, and counts for nothing either way. The next
job is *fresh*: its number is the least that counts from then on, and it travels behind those that do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from swarmllm_proto.limits import JOBS_UNDER_WAY_MAX


@dataclass(frozen=True, slots=True)
class LaunchedJob:
    """A job that leaves the head."""

    position: int
    """Of its first token."""
    tokens: tuple[int, ...]
    """At least one. Guesses, but for the first of a job that is fresh or has no number."""
    number: int = 0
    """0: no other job of the request is under way."""
    fresh: int = 0
    """Jobs with lower numbers are refused."""

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)


class JobsInFlight:
    def __init__(self) -> None:
        self._jobs: deque[LaunchedJob] = deque()
        """Oldest first."""
        self._n_refused = 0
        """Of the oldest."""
        self._n_numbered = 0
        self.fresh = 1
        """The least number that counts."""

    def __repr__(self) -> str:
        return f"<JobsInFlight {len(self._jobs)} under way, {self._n_refused} of them refused>"

    @property
    def n_under_way(self) -> int:
        """The number of jobs under way, refused ones included."""
        return len(self._jobs)

    @property
    def n_spare(self) -> int:
        """The number of further jobs that may leave."""
        return max(0, JOBS_UNDER_WAY_MAX - len(self._jobs))

    @property
    def ahead(self) -> tuple[int, ...]:
        """The tokens of all jobs that are under way and not refused."""
        counting = list(self._jobs)[self._n_refused :]
        return tuple(token for job in counting for token in job.tokens)

    @property
    def next_token(self) -> int | None:
        """The first token of the job behind the one that is judged, which that one has to give. None: there
        is no such job."""
        return self._jobs[self._n_refused].tokens[0] if len(self._jobs) > self._n_refused else None

    def brings(self, token: int, position: int) -> bool:
        """Whether the job behind the one that is judged begins with this token at this position."""
        job = self._jobs[self._n_refused] if len(self._jobs) > self._n_refused else None
        return job is not None and (job.tokens[0], job.position) == (token, position)

    def launch(
        self, position: int, jobs: Sequence[Sequence[int]], *, are_numbered: bool = False
    ) -> tuple[LaunchedJob, ...]:
        """Jobs with these tokens leave, each behind the one before. `position`: of the first token, where no
        other job counts."""
        launched: list[LaunchedJob] = []
        if len(self._jobs) > self._n_refused:
            position = self._jobs[-1].end
        else:
            self.refuse()
        for tokens in jobs:
            job = LaunchedJob(position, tuple(tokens))
            if are_numbered:
                self._n_numbered += 1
                job = LaunchedJob(position, tuple(tokens), self._n_numbered, self.fresh)
            self._jobs.append(job)
            launched.append(job)
            position = job.end
        return tuple(launched)

    def land(self, position: int, n_rows: int, number: int = 0) -> LaunchedJob | None:
        """A job is back, and with it every one that left before it is over. None: it counts for nothing."""
        job = self.find(position, n_rows, number)
        if job is None:
            return None
        counts = self._jobs.index(job) >= self._n_refused
        while self._jobs.popleft() is not job:
            self._n_refused = max(0, self._n_refused - 1)
        self._n_refused = max(0, self._n_refused - 1)
        return job if counts else None

    def find(self, position: int, n_rows: int, number: int = 0) -> LaunchedJob | None:
        """The job with this number that is under way, refused or not; of those without a number, the one
        there."""
        for job in self._jobs:
            if job.number == number and (job.position, len(job.tokens)) == (position, n_rows):
                return job
        return None

    def refuse(self) -> None:
        """Refuse all jobs that are under way."""
        self._n_refused = len(self._jobs)
        self.fresh = self._n_numbered + 1
