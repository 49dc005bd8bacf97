"""Plans which tensor is fetched from which node: the bookkeeping of one fetch, without I/O.

A tensor is what is handed out: as a rule all its bytes come from one holder, and several tensors are on their
way at once, which keeps several holders busy. Each MiB is checked before it is written (see
`models.tensor_digest`), so a tensor whose holder fails or lies goes on at another one where the first
stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swarmllm.models.manifest import TensorEntry
from swarmllm_proto.identifiers import NodeId


@dataclass(eq=False)
class FetchTask:
    """One tensor to be fetched."""

    tensor: TensorEntry
    sources: set[NodeId] = field(default_factory=set)
    """Who gave right bytes of it."""
    not_at: set[NodeId] = field(default_factory=set)
    """Holders that do not have it."""


class FetchPlan:
    def __init__(self, tensors: Iterable[TensorEntry], holders: Iterable[NodeId]) -> None:
        self._pending = [FetchTask(tensor) for tensor in tensors]
        self._active: set[FetchTask] = set()
        self._holders = set(holders)
        self._failures: dict[str, int] = {}
        self.liars: set[NodeId] = set()

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
    def holders(self) -> frozenset[NodeId]:
        """Those that are still worth asking."""
        return frozenset(self._holders)

    def take(self, node_id: NodeId) -> FetchTask | None:
        """The next tensor for a holder; None: nothing for now."""
        if node_id not in self._holders:
            return None
        for index, task in enumerate(self._pending):
            if self._may(task, node_id):
                self._active.add(task)
                return self._pending.pop(index)
        return None

    def arrived(self, task: FetchTask) -> None:
        """The whole tensor is there."""
        self._active.remove(task)
        for node_id in task.sources:
            self._failures.pop(node_id, None)

    def absent(self, task: FetchTask, node_id: NodeId) -> None:
        """The holder does not have it."""
        task.not_at.add(node_id)
        self.put_back(task)

    def failed(self, task: FetchTask, node_id: NodeId, max_failures: int) -> None:
        """The holder did not answer as it should; after `max_failures` in a row it is not asked any more."""
        self._failures[node_id] = self._failures.get(node_id, 0) + 1
        if self._failures[node_id] >= max_failures:
            self.gone(node_id)
        self.put_back(task)

    def lied(self, task: FetchTask, node_id: NodeId) -> None:
        """It sent wrong bytes; it is not asked any more."""
        self.liars.add(node_id)
        self.gone(node_id)
        self.put_back(task)

    def gone(self, node_id: NodeId) -> None:
        self._holders.discard(node_id)

    def put_back(self, task: FetchTask) -> None:
        """Another lane goes on with it."""
        self._active.remove(task)
        self._pending.insert(0, task)

    def _may(self, task: FetchTask, node_id: NodeId) -> bool:
        return node_id in self._holders and node_id not in task.not_at
