"""Computes the load and speed that a node announces, and decides when a change is announced.

Latencies wander with every forward and round trips with every ping; a record for each of them would be noise
on every node of the swarm. So only a change that could affect a route counts.

One second, once: the result stays in the data folder. Other programs that run at that moment must not count,
or a node would look slow for ever and never get a request that shows otherwise; so one thread works, and only
its processor time counts. Both figures are a lower bound of what libllama reaches; the route scales estimates
by how far those of observed nodes were off, so only their ratio between machines matters.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from swarmllm.memory_info import memory_bytes
from swarmllm.node.admission import Admission
from swarmllm.operating_system import n_cores
from swarmllm.pipeline.stage.capacity import Room
from swarmllm.scheduling.coordinates import TRUSTED_ERROR, Coordinate, moved
from swarmllm.scheduling.speeds import MAX_MODELS, MachineSpeed, Observations
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import PeerInfo
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import Gpu
from swarmllm_proto.swarm import (
    MAX_GPUS,
    GpuMemory,
    NetworkCoordinate,
    NodeCapability,
    ObservedLatency,
    ObservedLink,
)
from swarmllm_proto.tensors import ROW_FORMATS

MEMORY_BUDGET_S = 0.75
"""Decode is bound by it, and it wavers more than arithmetic does."""
FLOPS_BUDGET_S = 0.25
MIN_RUNS = 5
"""However long they take: the first one meets cold caches and threads that are still starting."""
SUM_BYTES = 64 * 2**20
"""More than the caches of most machines."""
PRODUCT_SIZE = 64
"""BLAS gives no threads to products as small as this; threads that wait for each other on busy cores have
made a machine look seventy times slower than it is."""
N_PRODUCTS = 64
FILE_MAX_BYTES = 4096


class _Measured(msgspec.Struct, frozen=True):
    memory_bytes_per_s: Annotated[float, Meta(gt=0, le=1e15)]
    flops: Annotated[float, Meta(gt=0, le=1e18)]


def machine_speed(file: Path) -> MachineSpeed:
    """What `file` says, else measured now and written there. Blocks for a second; never raises for
    the file: what cannot be kept is measured again next time."""
    measured = _read(file)
    if measured is None:
        measured = _Measured(_memory_bytes_per_s(), _flops())
        with contextlib.suppress(OSError):
            file.write_bytes(msgspec.json.encode(measured) + b"\n")
    return MachineSpeed(measured.memory_bytes_per_s, measured.flops)


def _read(file: Path) -> _Measured | None:
    try:
        with file.open("rb") as stream:
            return msgspec.json.decode(stream.read(FILE_MAX_BYTES), type=_Measured)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _memory_bytes_per_s() -> float:
    words = np.ones(SUM_BYTES // 8, np.int64)
    return words.nbytes / _best_s(lambda: int(words.sum()), MEMORY_BUDGET_S)


def _flops() -> float:
    matrices = np.ones((N_PRODUCTS, PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
    product_s = _best_s(lambda: float((matrices @ matrices)[0, 0, 0]), FLOPS_BUDGET_S) / N_PRODUCTS
    return n_cores() * 2 * PRODUCT_SIZE**3 / product_s


def _best_s(work: Callable[[], object], budget_s: float) -> float:
    """The quickest of as many runs as fit the budget, in processor time: what disturbs only ever makes it
    slower."""
    best_s = float("inf")
    end_s = time.perf_counter() + budget_s
    n_runs = 0
    while True:
        n_runs += 1
        began_s = time.thread_time()
        work()
        best_s = min(best_s, time.thread_time() - began_s)
        if time.perf_counter() >= end_s and n_runs >= MIN_RUNS:
            return max(best_s, 1e-9)


MAX_LINKS = 32
CHANGE = 0.25
"""A relative change of this much."""
NEGLIGIBLE_S = 0.001
"""Round trips that differ by less are alike."""
STRAY_S = 0.004
"""A coordinate that has moved farther is published."""
FEW = 4
"""From here down, each free slot counts; above, routes do not care."""


def describe(
    observations: Observations,
    peers: Iterable[PeerInfo],
    admission: Admission,
    stage_requests: int,
    room: Room,
    placed_models: tuple[ModelId, ...],
    placing_free_bytes: int,
    placing_free_disk_bytes: int | UnsetType = UNSET,
    accepts_shares_of: tuple[str, ...] = (),
    *,
    commits: bool = False,
    gpus: tuple[Gpu, ...] = (),
) -> NodeCapability:
    total_bytes, free_bytes = memory_bytes()
    measured = sorted(
        (peer.rtt_s, peer.node_id, peer.bytes_per_s or 0.0) for peer in peers if peer.rtt_s is not None
    )
    place = observations.place.coordinate
    return NodeCapability(
        memory_total_bytes=total_bytes,
        memory_free_bytes=free_bytes,
        active_requests=admission.n_active,
        max_requests=admission.max_running,
        stage_requests=stage_requests,
        queued_requests=admission.n_queued,
        memory_bytes_per_s=observations.machine.memory_bytes_per_s,
        flops=observations.machine.flops,
        observed_latencies=tuple(
            ObservedLatency(
                model_id=model_id, decode_s=latency.decode_s or 0.0, prefill_s=latency.prefill_s or 0.0
            )
            for model_id, latency in observations.latest()[:MAX_MODELS]
        ),
        observed_links=tuple(
            ObservedLink(node_id=node_id, rtt_s=rtt_s, bytes_per_s=bytes_per_s)
            for rtt_s, node_id, bytes_per_s in measured[:MAX_LINKS]
        ),
        coordinate=NetworkCoordinate(
            position_s=(place.position_s[0], place.position_s[1], place.position_s[2]),
            height_s=place.height_s,
            error=place.error,
        ),
        slots=room.slots,
        free_slots=room.free_slots,
        free_kv_tokens=room.free_kv_tokens,
        placed_models=placed_models[:MAX_MODELS],
        placing_free_bytes=placing_free_bytes,
        row_formats=ROW_FORMATS[1:],
        placing_free_disk_bytes=placing_free_disk_bytes,
        accepts_shares_of=accepts_shares_of or UNSET,
        commits=commits or UNSET,
        picture_runs=True,
        gpus=tuple(map(_announced, gpus[:MAX_GPUS])) or UNSET,
    )


def _announced(gpu: Gpu) -> GpuMemory:
    name = gpu.description or gpu.name
    return GpuMemory(name=name, total_bytes=gpu.total_bytes, free_bytes=gpu.free_bytes)


def float_among(own: str, at: Coordinate, peers: Iterable[PeerInfo], registry: Registry) -> Coordinate:
    """Where this node is after another look at the round trips to its peers."""
    for peer in sorted(peers, key=lambda peer: peer.node_id):
        record = registry.node(peer.node_id)
        place = record.capability.coordinate if record is not None else None
        if peer.rtt_s is not None and place is not None:
            other = Coordinate(place.position_s, place.height_s, place.error)
            at = moved(at, other, peer.rtt_s, f"{own} {peer.node_id}")
    return at


def work_has_changed(old: NodeCapability, new: NodeCapability) -> bool:
    """Of what a node takes, which routes should know as it was a second ago. Free memory alone is none."""
    return _counts(old) != _counts(new)


def speeds_have_changed(old: NodeCapability, new: NodeCapability) -> bool:
    """Of its models, which routes should know as soon."""
    return _changed(_work_s(old), _work_s(new))


def load_has_changed(old: NodeCapability, new: NodeCapability) -> bool:
    """Which routes should know as soon, and which changes with every request."""
    return _load(old) != _load(new)


def links_have_changed(old: NodeCapability, new: NodeCapability) -> bool:
    """On busy machines they wander all the time, of all nodes at once."""
    return _changed(_ways_s(old), _ways_s(new))


def place_has_changed(old: NodeCapability, new: NodeCapability) -> bool:
    """Of this node among the others; it wanders with the links."""
    return _strayed(old.coordinate, new.coordinate)


def steady(old: NodeCapability, new: NodeCapability) -> NodeCapability:
    """The new one, with the speeds and links of the old one where they are about the same."""
    if not speeds_have_changed(old, new):
        new = msgspec.structs.replace(new, observed_latencies=old.observed_latencies)
    if not links_have_changed(old, new):
        new = msgspec.structs.replace(new, observed_links=old.observed_links)
    return new


def _changed(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]) -> bool:
    return before.keys() != after.keys() or any(
        abs(after[key] - seconds) > max(CHANGE * seconds, NEGLIGIBLE_S if key[0] == "rtt" else 0.0)
        for key, seconds in before.items()
    )


def _load(capability: NodeCapability) -> tuple[int, ...]:
    return (
        capability.active_requests,
        capability.stage_requests,
        capability.queued_requests,
        min(capability.free_slots, FEW),
    )


def _counts(capability: NodeCapability) -> tuple[object, ...]:
    return (
        capability.max_requests,
        capability.placing_free_bytes,
        capability.placing_free_disk_bytes,
        capability.accepts_shares_of,
        capability.placed_models,
        capability.memory_bytes_per_s,
        capability.flops,
        [(gpu.name, gpu.total_bytes) for gpu in capability.gpus or ()],
    )


def _ways_s(capability: NodeCapability) -> dict[tuple[str, str], float]:
    seconds: dict[tuple[str, str], float] = {
        ("rtt", link.node_id): link.rtt_s for link in capability.observed_links
    }
    for link in capability.observed_links:
        if link.bytes_per_s:
            seconds["mebibyte", link.node_id] = 2**20 / link.bytes_per_s
    return seconds


def _work_s(capability: NodeCapability) -> dict[tuple[str, str], float]:
    seconds: dict[tuple[str, str], float] = {}
    for latency in capability.observed_latencies:
        seconds["decode", latency.model_id] = latency.decode_s
        seconds["prefill", latency.model_id] = latency.prefill_s
    return seconds


def _strayed(old: NetworkCoordinate | None, new: NetworkCoordinate | None) -> bool:
    if old is None or new is None:
        return old is not new
    apart_s = math.dist(old.position_s, new.position_s) + abs(old.height_s - new.height_s)
    was_settled, is_settled = (place.error <= TRUSTED_ERROR for place in (old, new))
    # Nobody believes a node that is not sure of its place to be there.
    return was_settled != is_settled or (is_settled and apart_s > STRAY_S)
