"""Estimates the latency of one request on a route, in seconds.

    entry        the prompt's way from the origin to the first stage
  + per layer    prompt rows that are not known there x prefill latency + answer rows x decode latency,
                 where the layer runs, both times (1 + requests running there): a node shares its cores
                 among them
  + per hop      answer rows x (one-way latency + what handling a job costs) + bytes / bandwidth
  + closing hop  answer rows x the same latency, last stage to first: the token goes back without its bytes
  + exit         the last token's way to the origin; earlier ones travel while the next are computed

Latency is between the two ends of each hop, never from the origin to each. For a pair that nobody has
measured the network coordinates of the two predict it, where both are sure of theirs; else the two are taken
to be as far apart as the farther of them is from the origin: it lies between the bounds of the triangle, so a
wrong guess is off by at most the nearer one's distance.

What is assumed where nothing was measured has a name below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from swarmllm.scheduling.coordinates import DIMENSIONS, Coordinate, predicted_rtt_s
from swarmllm_proto.identifiers import NodeId

Seconds = NDArray[np.float64]
Indices = NDArray[np.intp]

HOP_HANDLING_S = 0.0005
"""Framing, queues and a worker's turn, per job and hop, until an origin has seen what it takes."""
LINK_BYTES_PER_S = 125e6
"""1 Gbit/s between two nodes that have never moved much between them."""
UNMEASURED_RTT_S = 0.1
"""To a peer whose round trip is not known yet: far enough not to be preferred for that."""
STAGE_TIE_S = 1e-9
LAYER_TIE_S = 1e-12
"""Too little to feel, enough to decide: of equal routes the one with fewer stages, then with more layers at
home."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The request whose cost is estimated."""

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
    lacks: str = ""
    """Why it would refuse one more, in words for people."""
    is_measured: bool = False
    """The decode latency was observed on real forwards, not estimated."""

    @property
    def is_full(self) -> bool:
        return bool(self.lacks)


@dataclass(frozen=True, slots=True)
class RouteInputs:
    """Everything that a route depends on besides the holdings; `speeds` has every candidate."""

    origin: NodeId
    workload: Workload
    speeds: Mapping[NodeId, NodeSpeed]
    origin_rtt_s: Mapping[NodeId, float] = field(default_factory=dict)
    """From the origin, by node id."""
    pair_rtt_s: Mapping[tuple[NodeId, NodeId], float] = field(default_factory=dict)
    """Between two other nodes, as one of them reports it; the smaller where both do and differ."""
    coordinates: Mapping[NodeId, Coordinate] = field(default_factory=dict)
    origin_bytes_per_s: Mapping[NodeId, float] = field(default_factory=dict)
    pair_bytes_per_s: Mapping[tuple[NodeId, NodeId], float] = field(default_factory=dict)
    """As `pair_rtt_s`; the larger where both report."""
    hop_handling_s: float = HOP_HANDLING_S
    """What the origin has seen a hop take besides its way."""
    leans: Mapping[NodeId, float] = field(default_factory=dict)
    """By node id: the part by which the origin counts its computing dearer than it is, so that not all
    origins choose alike."""

    cached_rows: Mapping[NodeId, int] = field(default_factory=dict)
    """By node id: first rows of the prompt that are known there, where it runs all layers. (In a longer route
    nobody knows them; but a node is cheap for every layer then, so it has them all or hardly any.)"""

    def measured_rtt_s(self, a: NodeId, b: NodeId) -> float | None:
        """None: neither of the two has said."""
        if a == b:
            return 0.0
        if self.origin in (a, b):
            return self.origin_rtt_s.get(b if a == self.origin else a)
        pairs = (self.pair_rtt_s.get((a, b)), self.pair_rtt_s.get((b, a)))
        return min((rtt for rtt in pairs if rtt is not None), default=None)

    def rtt_s(self, a: NodeId, b: NodeId) -> float:
        measured_s = self.measured_rtt_s(a, b)
        if measured_s is not None:
            return measured_s
        here, there = self.coordinates.get(a), self.coordinates.get(b)
        if here is not None and there is not None and here.is_settled and there.is_settled:
            return predicted_rtt_s(here, there)
        if self.origin in (a, b):
            return UNMEASURED_RTT_S
        return max(self.rtt_s(self.origin, a), self.rtt_s(self.origin, b))

    def bytes_per_s(self, a: NodeId, b: NodeId) -> float:
        if self.origin in (a, b):
            return self.origin_bytes_per_s.get(b if a == self.origin else a, LINK_BYTES_PER_S)
        pairs = (self.pair_bytes_per_s.get((a, b), 0.0), self.pair_bytes_per_s.get((b, a), 0.0))
        return max(pairs) or LINK_BYTES_PER_S

    def layer_s(self, node_id: NodeId) -> float:
        """One layer of this node, for the whole request."""
        speed, work = self.speeds[node_id], self.workload
        n_prompt = max(0, work.n_prompt_tokens - self.cached_rows.get(node_id, 0))
        rows_s = n_prompt * speed.prefill_s + work.n_output_tokens * speed.decode_s
        rows_s *= 1 + self.leans.get(node_id, 0.0)
        return rows_s * (1 + speed.n_active) + (LAYER_TIE_S if node_id != self.origin else 0.0)

    def hop_s(self, a: NodeId, b: NodeId) -> float:
        if a == b:
            return 0.0
        work = self.workload
        n_bytes = (work.n_prompt_tokens + work.n_output_tokens) * work.row_bytes
        return self._latency_s(a, b) + n_bytes / self.bytes_per_s(a, b) + STAGE_TIE_S

    def closing_s(self, last: NodeId, first: NodeId) -> float:
        return 0.0 if last == first else self._latency_s(last, first)

    def entry_s(self, first: NodeId) -> float:
        if first == self.origin:
            return 0.0
        n_bytes = self.workload.n_prompt_tokens * self.workload.row_bytes
        bytes_per_s = self.bytes_per_s(self.origin, first)
        return self.rtt_s(self.origin, first) / 2 + self.hop_handling_s + n_bytes / bytes_per_s

    def exit_s(self, last: NodeId) -> float:
        return 0.0 if last == self.origin else self.rtt_s(last, self.origin) / 2 + self.hop_handling_s

    def _latency_s(self, a: NodeId, b: NodeId) -> float:
        return self.workload.n_output_tokens * (self.rtt_s(a, b) / 2 + self.hop_handling_s)


class CostTable:
    """The same costs as arrays over `node_ids`, for the search. The cost between two nodes is computed for
    the pairs that a search needs: of a thousand nodes, most pairs never meet at a boundary."""

    def __init__(self, inputs: RouteInputs, node_ids: Sequence[NodeId]) -> None:
        self._known = known = inputs
        self._index = {node_id: i for i, node_id in enumerate(node_ids)}
        self._origin = self._index.get(known.origin, -1)
        self._rtt: Seconds = np.array([known.rtt_s(known.origin, node_id) for node_id in node_ids])
        places = [known.coordinates.get(node_id) for node_id in node_ids]
        self._settled = np.array([place is not None and place.is_settled for place in places], np.bool_)
        nowhere = Coordinate()
        positions = np.array([(place or nowhere).position_s for place in places], np.float64)
        self._axes: list[Seconds] = list(positions.reshape(len(node_ids), DIMENSIONS).T)
        self._height: Seconds = np.array([(place or nowhere).height_s for place in places])
        self.layer: Seconds = self._layer(node_ids)
        ways: Seconds = self._rtt / 2 + known.hop_handling_s
        n_bytes = known.workload.n_prompt_tokens * known.workload.row_bytes
        self.entry: Seconds = ways + n_bytes / self._from_origin(node_ids)
        self.exit: Seconds = ways
        if self._origin >= 0:
            self.entry[self._origin] = self.exit[self._origin] = 0.0

    def _layer(self, node_ids: Sequence[NodeId]) -> Seconds:
        known = self._known
        speeds = [known.speeds[node_id] for node_id in node_ids]
        prefill = np.array([speed.prefill_s for speed in speeds], np.float64)
        decode = np.array([speed.decode_s for speed in speeds], np.float64)
        n_active = np.array([speed.n_active for speed in speeds], np.float64)
        n_prompt, lean = np.full(len(speeds), float(known.workload.n_prompt_tokens)), np.zeros(len(speeds))
        for node_id, n_rows in known.cached_rows.items():
            if (at := self._index.get(node_id)) is not None:
                n_prompt[at] = max(0.0, n_prompt[at] - n_rows)
        for node_id, part in known.leans.items():
            if (at := self._index.get(node_id)) is not None:
                lean[at] = part
        rows = n_prompt * prefill + known.workload.n_output_tokens * decode
        tie = np.full(len(speeds), LAYER_TIE_S)
        if self._origin >= 0:
            tie[self._origin] = 0.0
        layer: Seconds = rows * (1 + lean) * (1 + n_active) + tie
        return layer

    def _from_origin(self, node_ids: Sequence[NodeId]) -> Seconds | float:
        """Bytes per second."""
        known = self._known.origin_bytes_per_s
        if not known:
            return LINK_BYTES_PER_S
        return np.array([known.get(node_id, LINK_BYTES_PER_S) for node_id in node_ids], np.float64)

    def hop(self, senders: Indices, receivers: Indices) -> Seconds:
        """[n_receivers, n_senders]"""
        work = self._known.workload
        n_bytes = (work.n_prompt_tokens + work.n_output_tokens) * work.row_bytes
        hops: Seconds = self._latency(senders, receivers) + (n_bytes * self._slowness(senders, receivers))
        return np.where(receivers[:, None] == senders[None, :], 0.0, hops + STAGE_TIE_S)

    def closing(self, senders: Indices, receivers: Indices) -> Seconds:
        """[n_receivers, n_senders]"""
        return np.where(receivers[:, None] == senders[None, :], 0.0, self._latency(senders, receivers))

    def _latency(self, senders: Indices, receivers: Indices) -> Seconds:
        rows, columns = receivers[:, None], senders[None, :]
        settled = self._settled[rows] & self._settled[columns]
        rtt: Seconds = np.maximum(self._rtt[rows], self._rtt[columns])
        if settled.any():
            predicted: Seconds = np.zeros(settled.shape)
            for axis in self._axes:
                apart = axis[rows] - axis[columns]
                apart *= apart
                predicted += apart
            np.sqrt(predicted, out=predicted)
            predicted += self._height[rows] + self._height[columns]
            np.copyto(rtt, predicted, where=settled)
        if self._known.pair_rtt_s:
            measured = self._measured_rtt[rows, columns]
            np.copyto(rtt, measured, where=np.isfinite(measured))
        if self._origin >= 0:
            rtt[receivers == self._origin, :] = self._rtt[senders]
            rtt[:, senders == self._origin] = self._rtt[receivers, None]
        rtt /= 2
        rtt += self._known.hop_handling_s
        rtt *= self._known.workload.n_output_tokens
        return rtt

    def _slowness(self, senders: Indices, receivers: Indices) -> Seconds | float:
        """Seconds per byte."""
        if not self._known.pair_bytes_per_s and not self._known.origin_bytes_per_s:
            return 1 / LINK_BYTES_PER_S
        return self._measured_slowness[receivers[:, None], senders[None, :]]

    @cached_property
    def _measured_rtt(self) -> Seconds:
        """[n_nodes, n_nodes], inf where nobody has measured."""
        measured: Seconds = np.full((len(self._index),) * 2, np.inf)
        here, there, rtt = self._between(self._known.pair_rtt_s)
        np.minimum.at(measured, (here, there), rtt)
        np.minimum.at(measured, (there, here), rtt)
        return measured

    @cached_property
    def _measured_slowness(self) -> Seconds:
        origin = self._origin
        fastest: Seconds = np.zeros((len(self._index),) * 2)
        here, there, bytes_per_s = self._between(self._known.pair_bytes_per_s)
        np.maximum.at(fastest, (here, there), bytes_per_s)
        fastest = np.maximum(fastest, fastest.T)
        if origin >= 0:
            fastest[origin, :] = fastest[:, origin] = 0.0
        slowness: Seconds = 1 / np.where(fastest > 0, fastest, LINK_BYTES_PER_S)
        for node_id in self._known.origin_bytes_per_s if origin >= 0 else ():
            if (at := self._index.get(node_id)) is not None:
                seconds = 1 / self._known.bytes_per_s(self._known.origin, node_id)
                slowness[origin, at] = slowness[at, origin] = seconds
        return slowness

    def _between(self, known: Mapping[tuple[NodeId, NodeId], float]) -> tuple[Indices, Indices, Seconds]:
        """Of pairs that both are in the table: the two indices, and what is known."""
        get = self._index.get
        here = np.array([get(a, -1) for a, _ in known], np.intp)
        there = np.array([get(b, -1) for _, b in known], np.intp)
        values = np.fromiter(known.values(), np.float64, len(known))
        is_here = (here >= 0) & (there >= 0)
        return here[is_here], there[is_here], values[is_here]
