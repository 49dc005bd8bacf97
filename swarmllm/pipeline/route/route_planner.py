"""Chooses which nodes run which layers of a request, from what this node knows now.

It collects facts (registry: holdings and announcements of nodes; router: distances; pool: loaded layers) and
passes them to the pure part: `inputs` computes the inputs, and `assembly` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Final

import trio

from swarmllm.errors import NoPipeline
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.repair.plan import repair_route
from swarmllm.pipeline.route.assembly import Assembly, RouteQuery, assemble, plan_route
from swarmllm.pipeline.route.inputs import NetworkDistances, OwnLoad, route_inputs, workload
from swarmllm.pipeline.route.kernel_classes import in_one_class
from swarmllm.pipeline.route.measuring import idle_network_s, travel_s
from swarmllm.pipeline.route.row_formats import (
    Compression,
    choose_formats,
    lines_between,
    measured_packing,
)
from swarmllm.pipeline.route.suspects import sparing
from swarmllm.pipeline.route.untried import unless_much_longer
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.scheduling.candidates import candidates, runnable
from swarmllm.scheduling.cheapest import route_cost_s
from swarmllm.scheduling.constraints import Constraints
from swarmllm.scheduling.cost import RouteInputs
from swarmllm.scheduling.kernel_groups import KernelGroup
from swarmllm.scheduling.plan import Plan
from swarmllm.scheduling.route import RouteStage
from swarmllm.scheduling.speeds import Observations, PeerSpeeds
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import Router
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc.base import RowFormat
from swarmllm_proto.swarm import NodeCapability, Stage


@dataclass(frozen=True, slots=True)
class RequestSize:
    n_prompt_tokens: int = 128
    n_output_tokens: int = 128
    cached_rows: Mapping[NodeId, int] = field(default_factory=dict, compare=False)
    """By node id: of the prompt, as `RouteInputs` has it."""


DEFAULT_SIZE = RequestSize()
RUNNABLE_MAX: Final = 512
"""Kept sets of ranges: those of 256 nodes, twice. More would be memory that strangers fill."""
NO_SUSPECTS: Final[Mapping[NodeId, str]] = {}
UNSIGNED: Final = "it signs for no rows, and others have its layers"
INLINE_RANGES_MAX: Final = 48
"""Ranges among which a route is chosen at once, in a fraction of a millisecond. Among more it is chosen in a
thread: how many there are is for others to say, and the event loop must not wait for the search."""


class RoutePlanner:
    def __init__(
        self,
        node_id: NodeId,
        router: Router,
        registry: Registry,
        pool: Compute,
        observations: Observations,
        constraints: Constraints,
        speeds: PeerSpeeds,
        compression: Compression = "off",
        *,
        prefers_signed_rows: bool = False,
    ) -> None:
        """`prefers_signed_rows`: without nodes that do not sign for their rows, where there are others."""
        self._node_id = node_id
        self._router = router
        self._registry = registry
        self._pool = pool
        self._observations = observations
        self._constraints = constraints
        self._speeds = speeds
        # One after the other: side by side they would take turns at the interpreter, and the loop its.
        self._searches = trio.CapacityLimiter(1)
        self._compression: Compression = compression
        self._prefers_signed_rows = prefers_signed_rows

    async def choose(
        self,
        entry: CatalogueEntry,
        size: RequestSize,
        load: OwnLoad,
        avoid: Collection[NodeId],
        *,
        suspects: Sequence[NodeId] = (),
        untried: Collection[NodeId] = (),
        previous: Sequence[Stage] = (),
        broken: Assembly | None = None,
        accepted: Assembly | None = None,
        accepted_factor: float = 1.0,
        is_exact: bool = False,
        within: KernelGroup | None = None,
    ) -> Assembly:
        """Without those to avoid, and without as many suspects as can be spared. `untried`: nodes that are
        spared too, unless the route takes much longer then. `previous`: the pipeline of the conversation's
        last turn. `broken`: the request's own, to be repaired where that is worth it.
        `accepted`: the route that its stages have accepted already; it stays unless it takes more than
        `accepted_factor` times what the best one takes. `is_exact`: its rows may not be rounded, and nodes of
        one class compute them; `within`: of this one. Raises NoPipeline."""
        known = self._known(entry, size, load)
        if is_exact:
            known = replace(known, classes=self._classes(entry.model_id, known.held), within=within)
        if accepted is None:
            work = partial(_choose, known, avoid, tuple(suspects), tuple(untried), tuple(previous), broken)
        else:
            work = partial(_choose_instead, known, avoid, tuple(suspects), accepted, accepted_factor)
        if known.n_ranges <= INLINE_RANGES_MAX:
            chosen = work()
        else:
            chosen = await trio.to_thread.run_sync(  # type: ignore[call-arg]
                work, abandon_on_cancel=True, limiter=self._searches
            )
        formats = self._row_formats(entry, chosen.stages, is_exact=is_exact)
        return replace(chosen, row_formats=formats)

    def _row_formats(
        self, entry: CatalogueEntry, stages: Sequence[Stage], *, is_exact: bool
    ) -> tuple[RowFormat, ...]:
        if self._compression == "off":
            return ()
        records = {stage.node_id: self._registry.node(stage.node_id) for stage in stages}
        said = {node_id: record.capability for node_id, record in records.items() if record is not None}
        said.pop(self._node_id, None)
        width = entry.manifest.n_embd
        lines = lines_between(stages, self._node_id, said, self._distances().bytes_per_s)
        packing = measured_packing(width)
        return choose_formats(
            stages, self._node_id, self._compression, lines, packing, width, is_exact=is_exact
        )

    async def plan(
        self,
        entry: CatalogueEntry,
        size: RequestSize,
        load: OwnLoad,
        suspects: Mapping[NodeId, str] = NO_SUSPECTS,
        untried: Mapping[NodeId, str] = NO_SUSPECTS,
    ) -> Plan:
        """In a thread, because reasons take many times as long as the choice. `suspects`, `untried`: as
        `choose` has them, and why each is one. Raises NoPipeline."""
        known = self._known(entry, size, load)
        plan = await trio.to_thread.run_sync(_plan, known, suspects, untried)
        stages = [
            Stage(node_id=stage.node_id, start=stage.layers.start, end=stage.layers.end)
            for stage in plan.stages
        ]
        return replace(plan, row_formats=self._row_formats(entry, stages, is_exact=False))

    def _known(self, entry: CatalogueEntry, size: RequestSize, load: OwnLoad) -> _Known:
        # What a node says of a model is kept as it is indexed: here is only a look at each of them.
        held = dict(self._registry.held(entry.model_id))
        # This node knows what it has loaded better than its own last announcement does.
        held[self._node_id] = self._pool.loaded(entry.model_id)
        records = {node_id: self._registry.node(node_id) for node_id in held if node_id != self._node_id}
        unsigned = (
            node_id
            for node_id, each in records.items()
            if each is None or each.capability.commits is not True
        )
        return _Known(
            self._node_id,
            entry,
            size,
            held,
            self._registry.reachable(),
            {node_id: record.capability for node_id, record in records.items() if record is not None},
            self._distances(),
            self._observations,
            load,
            self._measured(entry.model_id, held),
            self._constraints,
            frozenset(unsigned) if self._prefers_signed_rows else frozenset(),
        )

    def holders(self, model_id: ModelId) -> Collection[NodeId]:
        """Other nodes that count and have layers of it ready."""
        return self._registry.held(model_id).keys() - {self._node_id}

    def without_picture_runs(self, model_id: ModelId) -> frozenset[NodeId]:
        """Of the nodes that hold layers of it, those that say nothing of `picture_runs`."""
        records = {each: self._registry.node(each) for each in self._registry.held(model_id)}
        records.pop(self._node_id, None)
        return frozenset(
            node_id
            for node_id, record in records.items()
            if record is None or record.capability.picture_runs is not True
        )

    def _classes(self, model_id: ModelId, node_ids: Iterable[NodeId]) -> dict[NodeId, str]:
        said = {node_id: self._registry.announced(model_id, node_id) for node_id in node_ids}
        found = {node_id: each.kernel_class or "" for node_id, each in said.items() if each is not None}
        return found | {self._node_id: self._pool.kernel_class(model_id)}

    def _measured(self, model_id: ModelId, node_ids: Iterable[NodeId]) -> dict[NodeId, float]:
        now_s = trio.current_time()
        found = {node_id: self._speeds.layer_s(model_id, node_id, now_s) for node_id in node_ids}
        return {node_id: layer_s for node_id, layer_s in found.items() if layer_s is not None}

    def announced_s(self, model_id: ModelId, node_id: NodeId) -> float | None:
        """What a node says now that a row of a layer takes it in decode; None: nothing."""
        record = self._registry.node(node_id)
        said = record.capability.observed_latencies if record is not None else ()
        return next((each.decode_s or None for each in said if each.model_id == model_id), None)

    def _distances(self) -> NetworkDistances:
        peers = self._router.peers()
        return NetworkDistances(
            {peer.node_id: peer.rtt_s for peer in peers if peer.rtt_s is not None},
            {peer.node_id: peer.bytes_per_s for peer in peers if peer.bytes_per_s},
            self._observations.place.coordinate,
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """What this node knows at one moment of all that a route of a model depends on. Threads may read it."""

    node_id: NodeId
    entry: CatalogueEntry
    size: RequestSize
    held: Mapping[NodeId, tuple[LayerRange, ...]]
    reachable: Collection[NodeId]
    capabilities: Mapping[NodeId, NodeCapability]
    distances: NetworkDistances
    observations: Observations
    """Goes on observing; a search reads few values of it, each whole."""
    load: OwnLoad
    measured_s: Mapping[NodeId, float]
    constraints: Constraints
    unsigned: frozenset[NodeId] = frozenset()
    """Nodes that come last because they do not sign for their rows."""
    classes: Mapping[NodeId, str] | None = None
    """Of their kernels, by node id, where only nodes of one class may make a route."""
    within: KernelGroup | None = None
    """The only class that counts."""

    @property
    def n_ranges(self) -> int:
        return sum(map(len, self.held.values()))


def _choose(
    known: _Known,
    avoid: Collection[NodeId],
    suspects: Sequence[NodeId],
    untried: Collection[NodeId],
    previous: Sequence[Stage],
    broken: Assembly | None,
) -> Assembly:
    """Pure. Raises NoPipeline."""
    query = replace(_query(known), previous=previous)

    def find(narrowed: RouteQuery) -> Assembly:
        repaired = repair_route(narrowed, broken) if broken is not None else None
        return repaired or assemble(narrowed)

    def choose(avoided: set[NodeId]) -> Assembly:
        narrowed = replace(query, avoid=avoided)
        if known.classes is None:
            return find(narrowed)
        return in_one_class(narrowed, known.classes, find, within=known.within)

    def timed(spared: Sequence[NodeId]) -> Assembly:
        return _timed(_sparing(choose, avoid, spared, known.unsigned), query.inputs)

    chosen = unless_much_longer(timed, suspects, known.held.keys() & untried)
    if broken is not None:
        return chosen
    return replace(chosen, network_s=idle_network_s(chosen.stages, query.inputs))


def _plan(known: _Known, suspects: Mapping[NodeId, str], untried: Mapping[NodeId, str]) -> Plan:
    """Pure. Raises NoPipeline."""
    query = _query(known)
    spared: dict[tuple[Stage, ...], set[NodeId]] = {}

    def find(avoided: set[NodeId]) -> Assembly:
        found = assemble(replace(query, avoid=avoided))
        spared[found.stages] = avoided
        return found

    def timed(suspected: Sequence[NodeId]) -> Assembly:
        return _timed(_sparing(find, (), suspected, known.unsigned), query.inputs)

    chosen = unless_much_longer(timed, tuple(suspects), known.held.keys() & untried.keys())
    reasons = {**untried, **suspects}
    return plan_route(query, {each: reasons.get(each, UNSIGNED) for each in sorted(spared[chosen.stages])})


def _sparing(
    choose: Callable[[set[NodeId]], Assembly],
    avoid: Collection[NodeId],
    suspects: Sequence[NodeId],
    unsigned: Collection[NodeId],
) -> Assembly:
    """Without those whose rows nobody signs for, where neither they nor a suspect are needed."""
    if unsigned:
        with suppress(NoPipeline):
            return choose({*avoid, *suspects, *unsigned})
    return sparing(choose, avoid, suspects)


def _choose_instead(
    known: _Known,
    avoid: Collection[NodeId],
    suspects: Sequence[NodeId],
    accepted: Assembly,
    factor: float,
) -> Assembly:
    """Pure. Raises NoPipeline."""
    best = _choose(known, avoid, suspects, (), (), None)
    inputs = _query(known).inputs
    if not accepted.node_ids <= inputs.speeds.keys():
        return accepted  # One of them tells of its layers no more, but has accepted.
    accepted_s = route_cost_s(_route_stages(accepted), inputs)
    return replace(best, accepted_cost_s=accepted_s) if accepted_s > factor * best.cost_s else accepted


def _query(known: _Known) -> RouteQuery:
    """Pure."""
    manifest = known.entry.manifest
    held = {
        node_id: _runnable(ranges, manifest.n_layers, manifest.cut_alignment)
        if node_id != known.node_id
        else ranges
        for node_id, ranges in known.held.items()
    }
    # Whatever anybody announces, a search has an end.
    holders = candidates(manifest.n_layers, manifest.cut_alignment, held, {known.node_id})
    return RouteQuery(
        manifest.n_layers,
        manifest.cut_alignment,
        holders,
        known.reachable,
        route_inputs(
            known.node_id,
            manifest,
            workload(manifest, known.size.n_prompt_tokens, known.size.n_output_tokens),
            holders,
            known.capabilities,
            known.distances,
            known.observations,
            known.load,
            known.measured_s,
            known.size.cached_rows,
        ),
        model_name=known.entry.name,
        constraints=known.constraints,
        whole_reason=manifest.whole_reason,
    )


@lru_cache(maxsize=RUNNABLE_MAX)
def _runnable(ranges: tuple[LayerRange, ...], n_layers: int, cut_alignment: int) -> tuple[LayerRange, ...]:
    """Of ranges that no route may use everything stays: the refusal says why. A node says the same ranges for
    many requests."""
    return runnable(ranges, n_layers, cut_alignment) or ranges


def _route_stages(assembly: Assembly) -> list[RouteStage]:
    return [RouteStage(stage.node_id, LayerRange(stage.start, stage.end)) for stage in assembly.stages]


def _timed(assembly: Assembly, inputs: RouteInputs) -> Assembly:
    """With what the request is expected to take."""
    route = _route_stages(assembly)
    work = inputs.workload
    first = replace(inputs, workload=replace(work, n_output_tokens=1))
    token = replace(inputs, workload=replace(work, n_prompt_tokens=0, n_output_tokens=1))
    return replace(
        assembly,
        cost_s=route_cost_s(route, inputs),
        first_s=route_cost_s(route, first),
        token_s=route_cost_s(route, token),
        travel_s=travel_s([stage.node_id for stage in route], inputs.rtt_s, inputs.hop_handling_s),
        n_active={stage.node_id: inputs.speeds[stage.node_id].n_active for stage in route},
    )
