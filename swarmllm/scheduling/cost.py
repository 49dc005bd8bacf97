"""What one request would feel on a route, in seconds.

    entry        the prompt's way from the origin to the first stage
  + per layer    prompt rows x prefill latency + answer rows x decode latency, where the layer runs, both
                 times (1 + requests running there): a node shares its cores among them
  + per hop      answer rows x (one-way latency + what handling a job costs) + bytes / bandwidth
  + closing hop  answer rows x the same latency, last stage to first: the token goes back without its bytes
  + exit         the last token's way to the origin; earlier ones travel while the next are computed

Latency is between the two ends of each hop, never from the origin to each. Pairs that nobody has measured
are taken to be as far apart as the farther of the two is from the origin: it lies between the bounds of the
triangle, so a wrong guess is off by at most the nearer one's distance.

What is assumed rather than measured has a name below. Bandwidth is one of them: the router counts bytes, not
how long they took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]

HOP_HANDLING_S = 0.0005
"""Framing, queues and a worker's turn, per job and hop."""
LINK_BYTES_PER_S = 125e6
"""1 Gbit/s between any two nodes."""
UNMEASURED_RTT_S = 0.1
"""To a peer whose round trip is not known yet: far enough not to be preferred for that."""
STAGE_TIE_S = 1e-9
LAYER_TIE_S = 1e-12
"""Too little to feel, enough to decide: of equal routes the one with fewer stages, then with more layers at
home."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The request whose cost is asked for."""

    n_prompt_tokens: int = 128
    n_output_tokens: int = 128
    row_bytes: int = 0
    """Of one hidden state on the wire."""


@dataclass(frozen=True, slots=True)
class NodeSpeed:
    """One node, for one model."""

    decode_s: float
    """Per layer and row; `prefill_s` likewise."""
    prefill_s: float
    n_active: int = 0
    """Requests that run there already."""
    is_full: bool = False
    """It would refuse one more."""
    is_measured: bool = False
    """The decode latency was observed on real forwards, not estimated."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Everything besides the holdings that a route depends on; `speeds` names every candidate."""

    origin: str
    workload: Workload
    speeds: Mapping[str, NodeSpeed]
    origin_rtt_s: Mapping[str, float] = field(default_factory=dict)
    """From the origin, by node id."""
    pair_rtt_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Between two other nodes, as one of them reports it; the smaller where both do and differ."""

    def rtt_s(self, a: str, b: str) -> float:
        if a == b:
            return 0.0
        if self.origin in (a, b):
            return self.origin_rtt_s.get(b if a == self.origin else a, UNMEASURED_RTT_S)
        reported = [
            rtt for rtt in (self.pair_rtt_s.get((a, b)), self.pair_rtt_s.get((b, a))) if rtt is not None
        ]
        return min(reported) if reported else max(self.rtt_s(self.origin, a), self.rtt_s(self.origin, b))

    def layer_s(self, node_id: str) -> float:
        """One layer of this node, for the whole request."""
        speed, work = self.speeds[node_id], self.workload
        rows_s = work.n_prompt_tokens * speed.prefill_s + work.n_output_tokens * speed.decode_s
        return rows_s * (1 + speed.n_active) + (LAYER_TIE_S if node_id != self.origin else 0.0)

    def hop_s(self, a: str, b: str) -> float:
        if a == b:
            return 0.0
        work = self.workload
        n_bytes = (work.n_prompt_tokens + work.n_output_tokens) * work.row_bytes
        return self._latency_s(a, b) + n_bytes / LINK_BYTES_PER_S + STAGE_TIE_S

    def closing_s(self, last: str, first: str) -> float:
        return 0.0 if last == first else self._latency_s(last, first)

    def entry_s(self, first: str) -> float:
        if first == self.origin:
            return 0.0
        n_bytes = self.workload.n_prompt_tokens * self.workload.row_bytes
        return self.rtt_s(self.origin, first) / 2 + HOP_HANDLING_S + n_bytes / LINK_BYTES_PER_S

    def exit_s(self, last: str) -> float:
        return 0.0 if last == self.origin else self.rtt_s(last, self.origin) / 2 + HOP_HANDLING_S

    def _latency_s(self, a: str, b: str) -> float:
        return self.workload.n_output_tokens * (self.rtt_s(a, b) / 2 + HOP_HANDLING_S)


class CostTable:
    """The same costs as arrays over `node_ids`, for the search: [n] and [n, n]."""

    def __init__(self, circumstances: Circumstances, node_ids: Sequence[str]) -> None:
        known = circumstances
        work = known.workload
        index = {node_id: i for i, node_id in enumerate(node_ids)}
        rtt = np.array([known.rtt_s(known.origin, node_id) for node_id in node_ids], np.float64)
        pairs: Seconds = np.maximum(rtt[:, None], rtt[None, :])
        for a, b in known.pair_rtt_s:
            if a in index and b in index and known.origin not in (a, b):
                pairs[index[a], index[b]] = pairs[index[b], index[a]] = known.rtt_s(a, b)
        latency: Seconds = work.n_output_tokens * (pairs / 2 + HOP_HANDLING_S)
        n_bytes = (work.n_prompt_tokens + work.n_output_tokens) * work.row_bytes
        self.hop: Seconds = latency + (n_bytes / LINK_BYTES_PER_S + STAGE_TIE_S)
        self.closing = latency
        np.fill_diagonal(self.hop, 0.0)
        np.fill_diagonal(self.closing, 0.0)
        self.layer: Seconds = np.array([known.layer_s(node_id) for node_id in node_ids], np.float64)
        self.entry: Seconds = np.array([known.entry_s(node_id) for node_id in node_ids], np.float64)
        self.exit: Seconds = np.array([known.exit_s(node_id) for node_id in node_ids], np.float64)
