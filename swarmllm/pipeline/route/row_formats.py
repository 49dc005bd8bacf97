"""Chooses the format in which the rows of a request travel, hop by hop, at its origin. Pure, but for
`measured_packing`, which times this machine.

A hop's two nodes must both say that they know a format. `lossless` changes no bit, so it is a matter of time
alone: what a line saves by fewer bytes against what packing and unpacking take. `q8_0` rounds rows, and the
text is no longer that of the uncut model: it is taken only where this node's user asks for it by name, never
by "auto", and never for a request that is to be exact. Rows that the origin embeds are never rounded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final, Literal, TypeAlias

import numpy as np

from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc.base import RowFormat
from swarmllm_proto.swarm import NodeCapability, Stage
from swarmllm_proto.tensors import BLOCK_VALUES, ROW_FORMATS, pack_rows, unpack_rows

Compression: TypeAlias = Literal["off", "lossless", "q8_0", "auto"]
"""What `inference.activation_compression` may say."""
SAMPLE_ROWS: Final = 16
_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class Packing:
    """The effect of lossless packing on rows of one width."""

    saved: float
    """Part of the bytes."""
    seconds_per_byte: float
    """Of f32, packing and unpacking together."""

    def pays(self, bytes_per_s: float) -> bool:
        """On a line of this throughput."""
        return self.saved > self.seconds_per_byte * bytes_per_s


@dataclass(frozen=True, slots=True)
class HopLine:
    """The line between the nodes of one hop."""

    formats: frozenset[str]
    """That both know, besides f32."""
    bytes_per_s: float | None
    """As measured; None: nobody has."""


def choose_formats(
    stages: Sequence[Stage],
    origin: NodeId,
    compression: Compression,
    lines: Mapping[tuple[NodeId, NodeId], HopLine],
    packing: Packing,
    width: int,
    *,
    is_exact: bool,
) -> tuple[RowFormat, ...]:
    """How rows come to each stage; empty where all come as f32. `lines`: by (sender, receiver). `is_exact`:
    the request asks for the uncut model's bits."""
    if compression == "off":
        return ()
    # To the first stage go embedded rows.
    hops = pairwise((origin, *(stage.node_id for stage in stages)))
    formats = tuple(
        _format(
            lines[hop] if hop in lines else HopLine(frozenset(), None),
            compression,
            packing,
            may_round=index > 0 and not is_exact and width % BLOCK_VALUES == 0,
        )
        if hop[0] != hop[1]
        else "f32"
        for index, hop in enumerate(hops)
    )
    return formats if any(each != "f32" for each in formats) else ()


def _format(line: HopLine, compression: Compression, packing: Packing, *, may_round: bool) -> RowFormat:
    if compression == "q8_0" and may_round and "q8_0" in line.formats:
        return "q8_0"
    if "lossless" not in line.formats:
        return "f32"
    if line.bytes_per_s is None:
        # Who asks for packing gets it until it is known not to pay; "auto" wants to know first.
        return "f32" if compression == "auto" else "lossless"
    return "lossless" if packing.pays(line.bytes_per_s) else "f32"


def lines_between(
    stages: Sequence[Stage],
    origin: NodeId,
    said: Mapping[NodeId, NodeCapability],
    measured: Mapping[NodeId, float],
) -> dict[tuple[NodeId, NodeId], HopLine]:
    """Of the hops of a pipeline. `said`: by the other nodes of themselves. `measured`: bytes per second of
    what this node received from its peers. A receiver's word about a line comes before its sender's."""
    lines = {}
    for sender, receiver in pairwise((origin, *(stage.node_id for stage in stages))):
        known = [
            frozenset(ROW_FORMATS if node_id == origin else said[node_id].row_formats or ())
            for node_id in (sender, receiver)
            if node_id == origin or node_id in said
        ]
        formats = known[0] & known[1] if len(known) == 2 else frozenset()
        speed = _announced_speed(said, receiver, sender) or _announced_speed(said, sender, receiver)
        if speed is None and origin in (sender, receiver):
            speed = measured.get(receiver if sender == origin else sender)
        lines[sender, receiver] = HopLine(formats, speed)
    return lines


def _announced_speed(said: Mapping[NodeId, NodeCapability], by: NodeId, of: NodeId) -> float | None:
    links = said[by].observed_links if by in said else ()
    return next((link.bytes_per_s or None for link in links if link.node_id == of), None)


@lru_cache(maxsize=16)
def measured_packing(width: int) -> Packing:
    """Of numbers like those that layers make; takes milliseconds, once per width."""
    rows = np.random.default_rng(0).standard_normal((SAMPLE_ROWS, width)).astype(np.float32)
    packed, took_s = b"", float("inf")
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        packed = pack_rows(rows, "lossless")
        unpack_rows(packed, n_rows=SAMPLE_ROWS, width=width)
        took_s = min(took_s, time.perf_counter() - began_s)
    return Packing(1 - len(packed) / rows.nbytes, took_s / rows.nbytes)
