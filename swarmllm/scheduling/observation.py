"""How fast this node runs the layers of each model, from what its forwards took.

An exponential moving average per model, decode and prefill apart: one row at a time is bound by memory, many
rows by arithmetic, and they differ by a factor that no constant knows. Both are in seconds per layer and
row, so that ranges of different lengths and prompts of different lengths feed the same number. The head and
the embedding count as part of the layers they run with: a last stage looks a little slower per layer than it
is, and that is what a request feels there.

Before the first forward there is the roofline: a row must read every weight once, and must multiply with
each. `roofline` makes that an estimate from two measured figures of the machine; the first observation
replaces it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from swarmllm.scheduling.coordinates import Coordinate
from swarmllm_proto.identifiers import ModelId

EMA_ALPHA = 0.2
MAX_MODELS = 32
"""As many as a node's record carries; the model that ran longest ago is forgotten first."""
SLOWEST_HOP_S = 0.05
"""What takes longer than that was no handling, but something that happened once."""
PREFILL_ROWS = 128
"""Rows that share one reading of the weights: the usual chunk of a prompt."""

Phase = Literal["decode", "prefill"]


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
    """What this node has seen of itself."""

    def __init__(self) -> None:
        self._by_model: OrderedDict[ModelId, Latency] = OrderedDict()
        self.machine = MachineSpeed()
        """Unknown until somebody has measured it."""
        self.coordinate = Coordinate()
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
