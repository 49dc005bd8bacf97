"""Which tensor is fetched from whom: the bookkeeping of one fetch, without I/O.

A tensor is what can be checked, so it is also what is handed out: as a rule all its bytes come from one
holder, and then a wrong hash says who lied. Several tensors are on their way at once, which keeps several
holders busy. Splitting single tensors among holders would gain little and make a lie anybody's.

A tensor whose holder fails goes to another, which continues where the first stopped. If that mixture is
wrong, nobody is blamed: it begins anew, and from then on whoever takes it over begins at its start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from swarmllm.models.manifest import TensorEntry

Verdict = Literal["right", "lie", "mixed"]
UNKNOWN = ""
"""The source of bytes that an earlier run fetched."""


@dataclass(eq=False)
class Task:
    """One tensor to be fetched."""

    tensor: TensorEntry
    sources: set[str] = field(default_factory=set)
    """Whose bytes are in it."""
    not_at: set[str] = field(default_factory=set)
    """Holders that do not have it, or lied about it."""
    single_source: bool = False

    def begins_anew(self, node_id: str) -> bool:
        """Whether `node_id` must not continue what others began."""
        return self.single_source and bool(self.sources - {node_id})


class Plan:
    def __init__(self, tensors: Iterable[TensorEntry], holders: Iterable[str]) -> None:
        self._pending = [Task(tensor) for tensor in tensors]
        self._active: set[Task] = set()
        self._holders = set(holders)
        self._failures: dict[str, int] = {}
        self.liars: set[str] = set()

    @property
    def is_done(self) -> bool:
        return not self._pending and not self._active

    @property
    def is_stuck(self) -> bool:
        """There is something left that no holder can give."""
        return not self._active and not any(
            self._may(task, node_id) for task in self._pending for node_id in self._holders
        )

    @property
    def left(self) -> tuple[TensorEntry, ...]:
        return tuple(task.tensor for task in (*self._active, *self._pending))

    @property
    def holders(self) -> frozenset[str]:
        """Those that are still worth asking."""
        return frozenset(self._holders)

    def take(self, node_id: str) -> Task | None:
        """The next tensor for a holder; None: nothing for now."""
        if node_id not in self._holders:
            return None
        for index, task in enumerate(self._pending):
            if self._may(task, node_id):
                self._active.add(task)
                return self._pending.pop(index)
        return None

    def arrived(self, task: Task, *, right: bool) -> Verdict:
        """All bytes of a tensor are there. A liar is not asked any more."""
        self._active.remove(task)
        if right:
            for node_id in task.sources:
                self._failures.pop(node_id, None)
            return "right"
        sources, task.sources = task.sources, set()
        task.single_source = True
        self._pending.append(task)
        if len(sources) == 1 and UNKNOWN not in sources:
            self.liars |= sources
            self._holders -= sources
            return "lie"
        return "mixed"

    def absent(self, task: Task, node_id: str) -> None:
        """The holder does not have it."""
        task.not_at.add(node_id)
        self._give_back(task)

    def failed(self, task: Task, node_id: str, max_failures: int) -> None:
        """The holder did not answer as it should; after `max_failures` in a row it is not asked any more."""
        self._failures[node_id] = self._failures.get(node_id, 0) + 1
        if self._failures[node_id] >= max_failures:
            self.gone(node_id)
        self._give_back(task)

    def gone(self, node_id: str) -> None:
        self._holders.discard(node_id)

    def put_back(self, task: Task) -> None:
        """Nobody's fault: another lane may go on with it."""
        self._give_back(task)

    def _give_back(self, task: Task) -> None:
        self._active.remove(task)
        self._pending.insert(0, task)

    def _may(self, task: Task, node_id: str) -> bool:
        return node_id in self._holders and node_id not in task.not_at
