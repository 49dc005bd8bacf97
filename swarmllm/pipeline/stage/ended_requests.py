"""Keeps what outlives requests on a node that runs stages of them: one object per request. Pure.

That a request was cancelled is remembered because a cancellation may overtake the assignment which it
cancels. Rows that a stage here refused are kept for the origin, which checks that no layer computes them.
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

CANCELLED_MAX: Final = 1024
REFUSED_MAX: Final = 8
REFUSED_S: Final = 30.0


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


@dataclass(slots=True)
class EndedRequest:
    is_cancelled: bool = False
    refused: RefusedRows | None = None

    @property
    def is_empty(self) -> bool:
        return not self.is_cancelled and self.refused is None


class EndedRequests:
    """By origin and request id: a node cannot cancel the request of another one, or read its rows.
    Cancellations and rows have limits of their own, so many of one push out none of the other."""

    def __init__(self) -> None:
        self._ended: OrderedDict[tuple[NodeId, str], EndedRequest] = OrderedDict()
        """The one that changed last is the last."""
        self._n_cancelled = 0

    def cancel(self, origin: NodeId, request_id: str) -> None:
        request = self._change(origin, request_id)
        self._n_cancelled += not request.is_cancelled
        request.is_cancelled = True
        if self._n_cancelled > CANCELLED_MAX:
            key, oldest = next((key, each) for key, each in self._ended.items() if each.is_cancelled)
            oldest.is_cancelled = False
            self._n_cancelled -= 1
            self._drop_if_empty(key)

    def is_cancelled(self, origin: NodeId, request_id: str) -> bool:
        request = self._ended.get((origin, request_id))
        return request is not None and request.is_cancelled

    def keep_rows(self, request_id: str, rows: RefusedRows) -> None:
        """Rows of more than CHECKED_ROWS_MAX bytes are not kept."""
        if len(rows.rows) > CHECKED_ROWS_MAX:
            return
        self._change(rows.origin, request_id).refused = rows
        with_rows = [key for key, each in self._ended.items() if each.refused is not None]
        for key in with_rows[:-REFUSED_MAX]:
            self._drop_rows(key)

    def answer(self, sender: NodeId, asked: FetchRows, now_s: float) -> RowsPiece | None:
        """The refused rows that the origin of a request asks for. None: there are none."""
        for key, each in list(self._ended.items()):
            if each.refused is not None and each.refused.at_s + REFUSED_S <= now_s:
                self._drop_rows(key)
        request = self._ended.get((sender, asked.request_id))
        kept = None if request is None else request.refused
        if kept is None or kept.boundary != asked.boundary:
            return None
        if (kept.position, kept.n_rows) != (asked.position, asked.n_tokens):
            return None
        return RowsPiece(
            request_id=asked.request_id,
            known=True,
            digest=blake3(kept.rows).digest(),
            rows=memoryview(b"" if asked.digest_only else kept.rows),
            commitment=UNSET if kept.commitment is None else kept.commitment,
        )

    def _change(self, origin: NodeId, request_id: str) -> EndedRequest:
        request = self._ended.setdefault((origin, request_id), EndedRequest())
        self._ended.move_to_end((origin, request_id))
        return request

    def _drop_rows(self, key: tuple[NodeId, str]) -> None:
        self._ended[key].refused = None
        self._drop_if_empty(key)

    def _drop_if_empty(self, key: tuple[NodeId, str]) -> None:
        if self._ended[key].is_empty:
            del self._ended[key]
