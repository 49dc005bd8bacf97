"""What a route must not do, whatever it would gain: applied before costs are looked at.

Private: the first and the last segment run on the node that was asked, so its peers see hidden states in the
middle of the model, never the rows of the embedding nor the logits. Pins: these layers of that model run on
that node and nowhere else.

Both only take ranges away, so the search needs not know of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmllm.errors import InvalidRequest
from swarmllm.models.layers import LayerRange
from swarmllm_proto.identifiers import MEANINGS, NODE_ID_PATTERN, NodeId, is_node_id


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
    pins: tuple[Pin, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A range that no route may use."""

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
    left: dict[NodeId, list[LayerRange]] = {}
    refused: list[Refusal] = []
    for node_id, ranges in holders.items():
        kept = left.setdefault(node_id, [])
        for layers in ranges:
            is_end = layers.start == 0 or layers.end == n_layers
            if constraints.is_private and is_end and node_id != origin:
                refused.append(Refusal(node_id, layers, "private: the ends stay at home"))
            elif any(pin.layers.overlaps(layers) and pin.node_id != node_id for pin in pins):
                refused.append(Refusal(node_id, layers, "pinned to another node"))
            else:
                kept.append(layers)
    return left, tuple(refused)
