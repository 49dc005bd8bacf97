"""In which order a stage runs the decode jobs of a request of which several are under way: pure.

Jobs that are on their way at once are numbered by the head (`speculation/jobs_in_flight.py`). On one link
they keep their order. Where a link breaks, some go by the daemons while others take the next link, and may
overtake each other or come twice. So a job waits for those before it, and runs once. Jobs below the newest
`fresh` number are refused ones: nobody waits for them, and they are not run.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Item = TypeVar("Item")


class JobOrder(Generic[Item]):
    def __init__(self) -> None:
        self._last = 0
        """The newest number that has had its turn."""
        self.fresh = 0
        """Numbers below this are refused."""
        self._fresh_seen = 0
        """The newest that a job has told of."""
        self._fresh_alone = 0
        """What that was when a job came beside which no other was under way."""
        self._held: dict[int, Item] = {}

    def __repr__(self) -> str:
        return f"<JobOrder after {self._last}, {len(self._held)} wait>"

    def take(
        self, number: int, fresh: int, item: Item, *, waits: bool = False
    ) -> tuple[list[Item], list[Item]]:
        """A job has come. Returns the jobs to run now, in order, and the jobs that will never run. `waits`:
        the rows before it are not here, so nothing runs before `go_on`."""
        if fresh <= self._fresh_alone or number < self.fresh or number <= self._last or number in self._held:
            return [], [item]
        dropped = self.refuse(fresh)
        self._fresh_seen = fresh
        self._held[number] = item
        return ([] if waits else self.go_on()), dropped

    def go_on(self) -> list[Item]:
        """Returns the jobs whose turn it is, in order."""
        ready: list[Item] = []
        while (due := max(self._last + 1, self.fresh)) in self._held:
            ready.append(self._held.pop(due))
            self._last = due
        return ready

    def refuse(self, fresh: int) -> list[Item]:
        """Drop the jobs below this number. Returns those of them that waited."""
        self.fresh = max(self.fresh, fresh)
        return [self._held.pop(number) for number in sorted(self._held) if number < self.fresh]

    def came_alone(self) -> list[Item]:
        """A job without a number has come, so no other job is under way. Returns those that waited."""
        self._fresh_alone = self._fresh_seen
        dropped = [self._held[number] for number in sorted(self._held)]
        self._held.clear()
        return dropped
