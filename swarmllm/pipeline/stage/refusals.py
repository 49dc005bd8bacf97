"""Keeps rows that a stage here refused, for the origin to see that no layer computes them.

Pure. The request is over by then, so nothing else keeps them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from blake3 import blake3
from msgspec import UNSET

from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import CHECKED_ROWS_MAX
from swarmllm_proto.swarm import FetchRows, RowsPiece

KEPT_MAX: Final = 8
KEPT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class RefusedRows:
    """Rows [position, position + n_rows) that came to the layers from `boundary` on."""

    origin: NodeId
    boundary: int
    position: int
    n_rows: int
    rows: bytes
    commitment: bytes | None
    """The header in which their sender signed for just these."""
    at_s: float


class Refusals:
    def __init__(self) -> None:
        self._kept: OrderedDict[str, RefusedRows] = OrderedDict()
        """By request."""

    def put(self, request_id: str, refusal: RefusedRows) -> None:
        if len(refusal.rows) > CHECKED_ROWS_MAX:
            return
        self._kept.pop(request_id, None)
        self._kept[request_id] = refusal
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)

    def answer(self, sender: NodeId, request: FetchRows, now_s: float) -> RowsPiece | None:
        """None: nothing of this origin's was refused there."""
        for key in [key for key, kept in self._kept.items() if kept.at_s + KEPT_S <= now_s]:
            del self._kept[key]
        kept = self._kept.get(request.request_id)
        if kept is None or kept.origin != sender or kept.boundary != request.boundary:
            return None
        if (kept.position, kept.n_rows) != (request.position, request.n_tokens):
            return None
        return RowsPiece(
            request_id=request.request_id,
            known=True,
            digest=blake3(kept.rows).digest(),
            rows=memoryview(b"" if request.digest_only else kept.rows),
            commitment=UNSET if kept.commitment is None else kept.commitment,
        )
