"""Computes the inputs of a route choice from what nodes announced and this node measured.

Each latency is taken from the best source there is: forwards observed on that node; else its roofline (see
`scheduling.speeds`), scaled by how far the rooflines of the observed nodes were from the truth, so that
an estimate competes with measurements on the same footing; else the median of what is known of others. Where
nothing at all is known, all nodes are equal and the network decides.

What this node has itself measured of another counts instead where it is much slower.

Pure: what the router and the registry say comes in as values.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from swarmllm.models.manifest import Manifest
from swarmllm.pipeline.stage.capacity import Room
from swarmllm.scheduling.coordinates import Coordinate
from swarmllm.scheduling.cost import HOP_HANDLING_S, NodeSpeed, RouteInputs, Workload
from swarmllm.scheduling.speeds import PREFILL_ROWS, Latency, MachineSpeed, Observations, roofline
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import NodeCapability

EQUAL_FOR_ALL_S = 0.001
"""Per layer, where nothing is known of any node: any number would do."""
SPREAD = 0.05
"""So much more than it takes may another node's computing count, for each origin and node another part of it:
origins that choose in the same second, from the same records, would otherwise all choose the same nodes of
many that are alike."""
FASTEST_BYTES_PER_S = 10e12
"""No machine reads weights faster; who announces less time for a row of a layer is taken to need this."""
SLOWEST_LAYER_S = 3600.0
"""A longer time makes no route worse, and sums of this one stay finite."""
SLOWER = 2.0
"""So many times slower than expected has a node to be measured, for the measurement to count."""
NOTHING_MEASURED: Mapping[NodeId, float] = MappingProxyType({})
NOTHING_CACHED: Mapping[NodeId, int] = MappingProxyType({})
SLOWEST_LINK_BYTES_PER_S = 1.0
"""The same of a line's speed: the time per byte stays finite."""
PAIRS_MAX = 2048
"""Links between other nodes that count in one choice, the nearest of each; coordinates do for the rest."""
ROW_BYTES_PER_VALUE = 4
"""Hidden states travel as float32."""


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """This node's own load, which is newer here than in the record that it publishes about once a second."""

    n_active: int = 0
    """Here."""
    lacks: str = ""
    """Here; see `NodeSpeed`."""
    sent: Mapping[NodeId, int] = field(default_factory=dict)
    """By node id: requests of this node that have just been sent there, and are in no record yet."""
    reported: Mapping[NodeId, int] = field(default_factory=dict)
    """By node id: requests that ran there when it last accepted one, as it said then. `sent` has those that
    went there since."""


@dataclass(frozen=True, slots=True)
class NetworkDistances:
    """How far this node's peers are, by node id, and this node's network coordinate."""

    rtt_s: Mapping[NodeId, float] = field(default_factory=dict)
    """Measured round trips."""
    bytes_per_s: Mapping[NodeId, float] = field(default_factory=dict)
    """Measured in large transfers."""
    coordinate: Coordinate | None = None


def workload(manifest: Manifest, n_prompt_tokens: int, n_output_tokens: int) -> Workload:
    return Workload(n_prompt_tokens, n_output_tokens, manifest.n_embd * ROW_BYTES_PER_VALUE)


def route_inputs(
    origin: NodeId,
    manifest: Manifest,
    work: Workload,
    node_ids: Collection[NodeId],
    capabilities: Mapping[NodeId, NodeCapability],
    distances: NetworkDistances,
    observations: Observations,
    load: OwnLoad,
    measured_s: Mapping[NodeId, float] = NOTHING_MEASURED,
    cached_rows: Mapping[NodeId, int] = NOTHING_CACHED,
) -> RouteInputs:
    """`capabilities`: what other nodes say of themselves. `measured_s`: what this node has measured of
    them, per layer and row in decode. `cached_rows`: as `RouteInputs` has it."""
    model_id = manifest.model_id
    layer_bytes, layer_weights = _layer_size(manifest)
    least_s = layer_bytes / FASTEST_BYTES_PER_S
    observed = {
        node_id: _observed(capabilities[node_id], model_id, least_s)
        for node_id in node_ids
        if node_id in capabilities
    }
    machines = {
        node_id: MachineSpeed(min(said.memory_bytes_per_s, FASTEST_BYTES_PER_S), said.flops)
        for node_id, said in capabilities.items()
    }
    observed[origin], machines[origin] = observations.latency(model_id), observations.machine
    guessed = {
        node_id: roofline(machines.get(node_id, MachineSpeed()), layer_bytes, layer_weights)
        for node_id in {*node_ids, origin}
    }
    decode = _completed(
        {node_id: latency.decode_s for node_id, latency in observed.items()},
        {node_id: latency.decode_s for node_id, latency in guessed.items()},
    )
    prefill = _completed(
        {node_id: latency.prefill_s for node_id, latency in observed.items()},
        {node_id: latency.prefill_s for node_id, latency in guessed.items()},
    )
    for node_id, layer_s in measured_s.items():
        # Less than that is handling, and no reason to leave a node whose cache is warm for one like it.
        if node_id in decode and layer_s > SLOWER * decode[node_id]:
            prefill[node_id] = min(prefill[node_id] * layer_s / decode[node_id], SLOWEST_LAYER_S)
            decode[node_id] = min(layer_s, SLOWEST_LAYER_S)
    speeds = {}
    for node_id in node_ids:
        said = capabilities.get(node_id, NodeCapability())
        n_active = load.reported.get(node_id, said.active_requests + said.stage_requests)
        n_active += load.sent.get(node_id, 0)
        lacks = _lack(said, n_active, work)
        if node_id == origin:
            n_active, lacks = load.n_active, load.lacks
        is_measured = node_id in observed and observed[node_id].decode_s is not None
        speeds[node_id] = NodeSpeed(decode[node_id], prefill[node_id], n_active, lacks, is_measured)
    # Thousands, in a large swarm: one loop, and nothing made but what is returned.
    pair_rtt_s: dict[tuple[NodeId, NodeId], float] = {}
    pair_bytes_per_s: dict[tuple[NodeId, NodeId], float] = {}
    others = speeds.keys() - {origin}
    n_links = PAIRS_MAX // max(1, len(others))
    for node_id in others & capabilities.keys():
        for link in capabilities[node_id].observed_links[:n_links]:
            if link.node_id in others:
                pair_rtt_s[node_id, link.node_id] = link.rtt_s
                if link.bytes_per_s:
                    pair_bytes_per_s[node_id, link.node_id] = max(link.bytes_per_s, SLOWEST_LINK_BYTES_PER_S)
    places = {
        node_id: Coordinate(place.position_s, place.height_s, place.error)
        for node_id in node_ids
        if node_id in capabilities and (place := capabilities[node_id].coordinate) is not None
    }
    if distances.coordinate is not None:
        places[origin] = distances.coordinate
    return RouteInputs(
        origin,
        work,
        speeds,
        dict(distances.rtt_s),
        pair_rtt_s,
        places,
        dict(distances.bytes_per_s),
        pair_bytes_per_s,
        HOP_HANDLING_S if observations.hop_s is None else observations.hop_s,
        {node_id: SPREAD * _share(origin, node_id) for node_id in node_ids if node_id != origin},
        cached_rows,
    )


def _share(origin: NodeId, node_id: NodeId) -> float:
    """Between 0 and 1, for each pair another one and always the same."""
    return zlib.crc32(f"{origin}>{node_id}".encode()) / 2**32


def _lack(said: NodeCapability, n_active: int, work: Workload) -> str:
    """Of a turn, a slot, or KV for the prompt and the answer. A node that does not say may have all of it."""
    if 0 < said.max_requests <= n_active:
        return f"{n_active} requests run there, and it takes {said.max_requests}"
    room = Room(said.slots, said.free_slots, said.free_kv_tokens)
    return room.lack(work.n_prompt_tokens + work.n_output_tokens)


def _completed(observed: Mapping[str, float | None], guessed: Mapping[str, float | None]) -> dict[str, float]:
    known = {node_id: min(seconds, SLOWEST_LAYER_S) for node_id, seconds in observed.items() if seconds}
    guessed = {node_id: guess and min(guess, SLOWEST_LAYER_S) for node_id, guess in guessed.items()}
    off = [known[node_id] / guess for node_id, guess in guessed.items() if guess and node_id in known]
    scale = statistics.median(off) if off else 1.0
    known = {node_id: guess * scale for node_id, guess in guessed.items() if guess} | known
    typical_s = statistics.median(known.values()) if known else EQUAL_FOR_ALL_S
    return {node_id: min(known.get(node_id, typical_s), SLOWEST_LAYER_S) for node_id in guessed}


def _observed(capability: NodeCapability, model_id: ModelId, least_s: float) -> Latency:
    """`least_s`: to read a layer's weights, for one row; rows of a prompt share a reading."""
    for latency in capability.observed_latencies:
        if latency.model_id == model_id:
            decode_s = max(latency.decode_s, least_s) if latency.decode_s else None
            prefill_s = max(latency.prefill_s, least_s / PREFILL_ROWS) if latency.prefill_s else None
            return Latency(decode_s, prefill_s)
    return Latency()


def prefill_here_s(
    model_id: ModelId,
    manifest: Manifest,
    observations: Observations,
    others: Iterable[NodeCapability] = (),
) -> float | None:
    """Seconds per row that this node takes for a prompt, in all layers; None where nothing is known. Of a
    model that has not run here, as much longer than its roofline as the `others` say they take."""
    observed_s = observations.latency(model_id).prefill_s
    if observed_s is None:
        size = _layer_size(manifest)
        observed_s = roofline(observations.machine, *size).prefill_s
        if observed_s is None:
            return None
        factors = []
        for said in others:
            machine = MachineSpeed(min(said.memory_bytes_per_s, FASTEST_BYTES_PER_S), said.flops)
            least_s = roofline(machine, *size).prefill_s
            taken_s = _observed(said, model_id, 0.0).prefill_s
            if least_s and taken_s:
                factors.append(taken_s / least_s)
        observed_s *= max(1.0, statistics.median(factors)) if factors else 1.0
    return observed_s * manifest.n_layers


def _layer_size(manifest: Manifest) -> tuple[float, float]:
    """(bytes, weights) of a layer, on average."""
    layers = [shard for shard in manifest.shards if shard.kind == "layer"]
    n_layers = max(1, len(layers))
    n_bytes = sum(shard.size_bytes for shard in layers)
    n_weights = sum(_product(tensor.shape) for shard in layers for tensor in shard.tensors)
    return n_bytes / n_layers, n_weights / n_layers


def _product(shape: Iterable[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product
