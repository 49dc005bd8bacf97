"""Segments of exact requests: cells and batches of their own, over the weights that all use.

The bits of a row depend on more than the request: on where its cells lie among others' (fused attention adds
up in tiles of cells, plain attention multiplies with all cells up to the last one in use), and on how many
rows share its batch (from some number of rows on, most types of matrices have other kernels). An exact
request has cells and batches that it shares with nobody, pieces of its prompt that are always as long, and
kernels that are not chosen by the clock. That holds for every type and architecture, and costs batching:
exact requests are computed one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmllm_proto.ipc import KvType
from swarmllm_workers.engine.memory import Footprint, Memory
from swarmllm_workers.engine.ranges import Range
from swarmllm_workers.engine.segment import Segment
from swarmllm_workers.errors import CallError


@dataclass
class _RequestSegments:
    """The segments of one request, as far as it has run."""

    n_rows: int
    """At most."""
    gives_rows: bool
    """The head is asked about all rows of a piece, and not about one."""
    kv_type: KvType | None = None
    """None: that of the settings."""
    segments: list[Segment] = field(default_factory=list)

    @property
    def ranges(self) -> list[Range]:
        return [(segment.start, segment.end) for segment in self.segments if not segment.is_closed]


class ExactSegments:
    def __init__(self, footprint: Footprint) -> None:
        self._footprint = footprint
        self._requests: dict[str, _RequestSegments] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request_id: str, n_rows: int, *, gives_rows: bool, kv_type: KvType | None = None) -> None:
        """Register the request, which has no rows yet. It will have at most `n_rows` rows, all in segments of
        its own, with keys and values of `kv_type`, or of the type of the settings."""
        self._requests[request_id] = _RequestSegments(n_rows, gives_rows, kv_type)

    def give_rows(self, request_id: str) -> None:
        """From now on the head computes all rows of a piece. Raises CallError bad_message if segments of the
        request have no room for these, because libllama would abort."""
        apart = self._requests[request_id]
        if not apart.gives_rows and any(each.has_head for each in self.of(request_id, [])):
            raise CallError("bad_message", "the request has begun, and wanted no rows of the head", "want")
        apart.gives_rows = True

    def open(self, request_id: str, path: tuple[Segment, ...], held: Memory) -> tuple[Segment, ...]:
        """Open segments of the request's own in place of those. Raises CallError out_of_memory if they do not
        fit beside what is `held`."""
        apart = self._requests[request_id]
        ranges = [(segment.start, segment.end) for segment in path]
        self._footprint.refuse_apart(
            ranges, apart.n_rows, held, gives_rows=apart.gives_rows, kv_type=apart.kv_type
        )
        n_before = len(apart.segments)
        try:
            apart.segments.extend(
                segment.apart(apart.n_rows, gives_rows=apart.gives_rows, kv_type=apart.kv_type)
                for segment in path
            )
        except CallError:
            for segment in apart.segments[n_before:]:
                segment.close()
            del apart.segments[n_before:]
            raise
        return tuple(apart.segments[n_before:])

    def of(self, request_id: str, others: list[Segment]) -> list[Segment]:
        """The segments in which the request may have rows: its own open ones, or `others` if it is not
        exact."""
        apart = self._requests.get(request_id)
        if apart is None:
            return others
        return [segment for segment in apart.segments if not segment.is_closed]

    def rename(self, request_id: str, new_id: str) -> None:
        """Give the segments of a request to another one. Does nothing if it has none."""
        apart = self._requests.pop(request_id, None)
        if apart is not None:
            self._requests[new_id] = apart

    def close(self, request_id: str) -> None:
        """Close the segments of the request. Does nothing if it has none."""
        for segment in self.of(request_id, []):
            segment.close()
        self._requests.pop(request_id, None)

    @property
    def memory(self) -> Memory:
        """The predicted memory of these segments, without the weights."""
        memory = Memory()
        for apart in self._requests.values():
            memory += self._footprint.apart(
                apart.ranges, apart.n_rows, gives_rows=apart.gives_rows, kv_type=apart.kv_type
            )
        return memory
