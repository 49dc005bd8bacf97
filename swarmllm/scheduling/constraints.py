"""Hard constraints of routes, applied before costs are compared.

Private: the first and the last segment run on the node that was asked, so its peers see hidden states in the
middle of the model, never the rows of the embedding or the logits. That node runs all the layers that it
holds from the first one on, and up to the last one: the more layers, the less its hidden states reveal. Pins:
these layers of that model run on that node and nowhere else.

Both only remove layers, so the search does not need to know them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from swarmllm.errors import InvalidRequest
from swarmllm.models.layers import LayerRange, merge, subtract
from swarmllm_proto.identifiers import MEANINGS, NODE_ID_PATTERN, NodeId, is_node_id

PRIVATE: Final = "private: the ends stay at home"
PINNED: Final = "pinned to another node"


@dataclass(frozen=True, slots=True)
class Pin:
    model: str
    """Its name here."""
    layers: LayerRange
    node_id: NodeId

    @classmethod
    def parse(cls, text: str) -> Pin:
        """NAME:START:END@NODE. Raises InvalidRequest."""
        rest, at, node_id = text.strip().rpartition("@")
        name, colon, layers = rest.partition(":")
        if not (at and node_id and name and colon):
            raise InvalidRequest(f"{text[:80]!r} is not of the form NAME:START:END@NODE", field="pins")
        if not is_node_id(node_id):
            raise InvalidRequest(f"the node of {text[:160]!r} {MEANINGS[NODE_ID_PATTERN]}", field="pins")
        return cls(name, LayerRange.parse(layers), node_id)


@dataclass(frozen=True, slots=True)
class Constraints:
    is_private: bool = False
    """Of every model."""
    pins: tuple[Pin, ...] = ()
    private_models: frozenset[str] = frozenset()
    """Their names here: private also where not every model is."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The layers of a node that no route may use, and why."""

    node_id: NodeId
    layers: LayerRange
    reason: str


def permitted(
    holders: Mapping[NodeId, Sequence[LayerRange]],
    constraints: Constraints,
    *,
    model: str,
    n_layers: int,
    origin: NodeId,
) -> tuple[dict[NodeId, list[LayerRange]], tuple[Refusal, ...]]:
    """(what is left of `holders`, what was taken away and why)"""
    pins = [pin for pin in constraints.pins if pin.model == model]
    is_private = constraints.is_private or model in constraints.private_models
    ends = _ends_at_home(holders.get(origin, ()), n_layers) if is_private else ()
    left: dict[NodeId, list[LayerRange]] = {}
    refused: list[Refusal] = []
    for node_id, ranges in holders.items():
        kept = tuple(ranges)
        elsewhere = [pin.layers for pin in pins if pin.node_id != node_id]
        barred = ((PRIVATE, ends if node_id != origin else ()), (PINNED, elsewhere))
        for reason, away in barred:
            if any(layers.overlaps(each) for layers in kept for each in away):
                rest = subtract(kept, away)
                refused += [Refusal(node_id, layers, reason) for layers in subtract(kept, rest)]
                kept = rest
        left[node_id] = list(kept)
    return left, tuple(refused)


def _ends_at_home(held: Iterable[LayerRange], n_layers: int) -> tuple[LayerRange, LayerRange]:
    """What nobody else runs: all that is `held` at both ends of the model, and if nothing is, a layer."""
    ranges = merge(held)
    first = next((layers.end for layers in ranges if layers.start == 0), 1)
    last = next((layers.start for layers in ranges if layers.end == n_layers), n_layers - 1)
    return LayerRange(0, first), LayerRange(last, n_layers)
