"""Keeps how fast this node and its peers run the layers of each model, as measured here.

`Observations` is about this node: an exponential moving average per model, decode and prefill apart. One row
at a time is bound by memory, many rows by arithmetic, and they differ by a factor that no constant knows.
Both are in seconds per layer and row, so that ranges and prompts of different lengths feed the same number.
The head and the embedding count as part of the layers they run with: a last stage looks a little slower per
layer than it is, and that is what a request feels there.

Before the first forward there is the roofline: a row must read every weight once, and must multiply with
each. `roofline` makes that an estimate from two measured figures of the machine; the first observation
replaces it.

`PeerSpeeds` is about other nodes. What a node announces of its speed is believed until this node has measured
it. A measurement is the time from one token to the next, less what ran here and what travelled; no other
clock than this node's is asked. Where one other node took part, all of it is that node's. Where several did,
each is charged the time that it reports, and a share by its layers of the time that no report explains: an
honest node beside a liar looks slow, too, until it is measured with others. So only a node that was alone is
held to what it announced.

Pure: the clock comes in as `now_s`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from swarmllm.scheduling.coordinates import Coordinate, SteadyCoordinate
from swarmllm_proto.identifiers import ModelId, NodeId

EMA_ALPHA = 0.2
MAX_MODELS = 32
"""As many as a node's record carries; the model that ran longest ago is forgotten first."""
SLOWEST_HOP_S = 0.05
"""What takes longer than that was no handling, but something that happened once."""
PREFILL_ROWS = 128
"""Rows that share one reading of the weights: the usual chunk of a prompt."""

Phase = Literal["decode", "prefill"]
LEAST_TOKENS: Final = 4
"""A mean over fewer says little."""
BELIEVED_S: Final = 600.0
"""Afterwards what the node announces counts again, until the next request: a node that was busy once must not
stay without work."""
CONTRADICTION: Final = 10.0
"""So many times slower than announced. An honest node announces the average of its own forwards once a
second; a processor that is shared with others makes both slow."""
CONTRADICTIONS_MIN: Final = 3
"""So often in a row, before trust is lost: an average over a fifth of each forward has followed by then."""
HANDLING_S: Final = 0.02
"""Per stage and token: queues and wake-ups on a busy machine are no reason to leave it."""
PEERS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds per layer and row; None: never observed."""

    decode_s: float | None = None
    prefill_s: float | None = None


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """What the roofline needs to know of a machine; zeros: unknown."""

    memory_bytes_per_s: float = 0.0
    flops: float = 0.0
    """float32 operations per second, all cores."""


class Observations:
    """This node's measurements of itself."""

    def __init__(self) -> None:
        self._by_model: OrderedDict[ModelId, Latency] = OrderedDict()
        self.machine = MachineSpeed()
        """Unknown until somebody has measured it."""
        self.floating = Coordinate()
        """Where each round trip moves this node."""
        self.place = SteadyCoordinate()
        """Where it says that it is."""
        self.hop_s: float | None = None
        """What a hop of this node's requests takes besides its way; None: never observed."""

    def __repr__(self) -> str:
        return f"<Observations models={len(self._by_model)}>"

    def observe(self, model_id: ModelId, phase: Phase, compute_s: float, n_layers: int, n_rows: int) -> None:
        """One forward of `n_rows` rows through `n_layers` layers took `compute_s`. Nonsense (no time, no
        rows) is ignored: a clock may stand still, the average must not."""
        if compute_s <= 0 or n_layers < 1 or n_rows < 1:
            return
        latest_s = compute_s / (n_layers * n_rows)
        known = self._by_model.pop(model_id, Latency())
        decode_s, prefill_s = known.decode_s, known.prefill_s
        if phase == "decode":
            decode_s = _averaged(decode_s, latest_s)
        else:
            prefill_s = _averaged(prefill_s, latest_s)
        self._by_model[model_id] = Latency(decode_s, prefill_s)
        while len(self._by_model) > MAX_MODELS:
            self._by_model.popitem(last=False)

    def observe_hop(self, handling_s: float) -> None:
        self.hop_s = _averaged(self.hop_s, min(handling_s, SLOWEST_HOP_S))

    def latency(self, model_id: ModelId) -> Latency:
        return self._by_model.get(model_id, Latency())

    def latest(self) -> list[tuple[ModelId, Latency]]:
        """Every model observed, the one that ran last first."""
        return list(reversed(self._by_model.items()))


def roofline(machine: MachineSpeed, layer_bytes: float, layer_weights: float) -> Latency:
    """The least that a layer of this size can take on this machine; None where the machine is unknown."""
    if machine.memory_bytes_per_s <= 0:
        return Latency()
    read_s = layer_bytes / machine.memory_bytes_per_s
    multiply_s = 2 * layer_weights / machine.flops if machine.flops > 0 else 0.0
    return Latency(max(read_s, multiply_s), max(read_s / PREFILL_ROWS, multiply_s))


def _averaged(average_s: float | None, latest_s: float) -> float:
    return latest_s if average_s is None else average_s + EMA_ALPHA * (latest_s - average_s)


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage on another node."""

    node_id: NodeId
    n_layers: int
    reported_s: float
    """What the stage says that it computes per token."""


def layer_times(stages: Sequence[StageTime], spent_s: float, handling_s: float = 0.0) -> dict[NodeId, float]:
    """Seconds per layer and row, by node. `spent_s`: per token, on all of these nodes together. Of the time
    that no stage reports, `handling_s` are charged to no node."""
    reported_s = sum(stage.reported_s for stage in stages)
    n_layers = sum(stage.n_layers for stage in stages)
    if spent_s <= 0 or n_layers < 1:
        return {}
    scale = min(1.0, spent_s / reported_s) if reported_s > 0 else 0.0
    unexplained_s = max(0.0, spent_s - reported_s - handling_s)
    times_s: dict[NodeId, float] = {}
    layers: dict[NodeId, int] = {}
    for stage in stages:
        took_s = stage.reported_s * scale + unexplained_s * stage.n_layers / n_layers
        times_s[stage.node_id] = times_s.get(stage.node_id, 0.0) + took_s
        layers[stage.node_id] = layers.get(stage.node_id, 0) + stage.n_layers
    return {node_id: took_s / layers[node_id] for node_id, took_s in times_s.items()}


@dataclass(slots=True)
class _Measured:
    layer_s: float
    at_s: float
    n_contradictions: int = 0
    """In a row."""


class PeerSpeeds:
    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, NodeId], _Measured] = OrderedDict()

    def __repr__(self) -> str:
        return f"<PeerSpeeds {len(self._known)}>"

    def observe(
        self,
        model_id: ModelId,
        node_id: NodeId,
        layer_s: float,
        now_s: float,
        *,
        announced_s: float | None,
        was_alone: bool,
    ) -> bool:
        """One request's mean. True: it is time to hold the node to what it announced."""
        known = self._known.pop((model_id, node_id), None)
        measured = _Measured(layer_s, now_s)
        if known is not None:
            if now_s - known.at_s < BELIEVED_S:
                measured.layer_s = (known.layer_s + layer_s) / 2
            measured.n_contradictions = known.n_contradictions
        if was_alone:
            is_contradicted = announced_s is not None and layer_s > CONTRADICTION * announced_s
            measured.n_contradictions = measured.n_contradictions + 1 if is_contradicted else 0
        is_due = measured.n_contradictions >= CONTRADICTIONS_MIN
        if is_due:
            measured.n_contradictions = 0
        self._known[model_id, node_id] = measured
        while len(self._known) > PEERS_MAX:
            self._known.popitem(last=False)
        return is_due

    def layer_s(self, model_id: ModelId, node_id: NodeId, now_s: float) -> float | None:
        """Decode, per layer and row; None: not measured lately."""
        known = self._known.get((model_id, node_id))
        return known.layer_s if known is not None and now_s - known.at_s < BELIEVED_S else None
