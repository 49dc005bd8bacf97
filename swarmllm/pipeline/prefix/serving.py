"""Gives KV of prompts' beginnings that this node announces to nodes that ask for it.

Nothing is kept for an asker: each request is answered with rows that the worker reads between two of its
steps, and only rows that it computed itself or checked.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final, Protocol, TypeVar

import trio
from msgspec import UNSET, UnsetType

from swarmllm.errors import SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.models.layers import LayerRange, covers
from swarmllm.pipeline.own_models import FindsOwnModels
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.frames import Payload
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc import PrefixLookedUp, PrefixSnapshotResponse
from swarmllm_proto.ipc.kv import CheckOutcome
from swarmllm_proto.limits import PREFIX_KV_MAX
from swarmllm_proto.swarm import KeptPrefix, PrefixKv, PrefixKvFetch
from swarmllm_proto.tensors import Tensor

log = logging.getLogger(__name__)

First = TypeVar("First")
Second = TypeVar("Second")

PEER_MAX: Final = 8
"""Requests of one peer that wait for the worker; one more is told that the node is busy."""
ALL_MAX: Final = 16
MODELS_MAX: Final = 8
ENDING_S: Final = 0.5
"""A request that goes on elsewhere may take to end here, and its rows to get the names that are asked for."""

_ABSENT: Final = PrefixKv(status="absent")
_BUSY: Final = PrefixKv(status="busy")


class PrefixStore(Protocol):
    """The part of WorkerPool that keeps KV; see there for what it raises."""

    def loaded(self, model_id: ModelId) -> tuple[LayerRange, ...]: ...

    def kept_prefixes(self) -> Mapping[ModelId, tuple[KeptPrefix, ...]]: ...

    async def look_up_prefix(
        self, model: ModelFile, layers: LayerRange, names: bytes, scope: str = "", *, cuts: bool = False
    ) -> PrefixLookedUp: ...

    async def export_prefix(
        self,
        model: ModelFile,
        layers: LayerRange,
        names: bytes,
        scope: str = "",
        *,
        first_row: int = 0,
        n_rows: int = 0,
        part: LayerRange | None = None,
        rounds: bool = False,
    ) -> tuple[PrefixSnapshotResponse, memoryview]: ...

    async def import_prefix(
        self,
        model: ModelFile,
        layers: LayerRange,
        names: bytes,
        snapshot: PrefixSnapshotResponse,
        data: Payload,
        scope: str = "",
        *,
        from_peer: bool = False,
        other_format: bool = False,
    ) -> int: ...

    async def check_prefix(
        self, model: ModelFile, layers: LayerRange, tokens: Tensor, blocks: tuple[int, ...], request_id: str
    ) -> CheckOutcome: ...


class EndsRequests(Protocol):
    async def next_end(self, origin: NodeId, model_id: ModelId) -> bool:
        """Waits until a request of this origin that runs here is over, and what it has here is held or freed.
        False: none runs."""
        ...


def whole_range(store: PrefixStore, model_id: ModelId, n_layers: int) -> LayerRange | None:
    """All layers, where they are loaded here as one."""
    return next((held for held in store.loaded(model_id) if (held.start, held.end) == (0, n_layers)), None)


class PrefixServing:
    def __init__(
        self,
        node_id: NodeId,
        store: PrefixStore,
        own_models: FindsOwnModels,
        counts: PipelineStatistics,
        may_ask: Callable[[NodeId], bool],
        timeout_s: float,
        requests: EndsRequests | None = None,
    ) -> None:
        """`node_id`: of this node. `may_ask`: whether that node is trusted enough. `requests`: in which this
        node takes part; the rows of one that ends may be asked for before they have the names."""
        self._node_id = node_id
        self._store = store
        self._own_models = own_models
        self._counts = counts
        self._may_ask = may_ask
        self._timeout_s = timeout_s
        self._requests = requests
        self._n_waiting: Counter[NodeId] = Counter()
        self._models: dict[ModelId, tuple[ModelFile, int]] = {}
        """Known ones and how many layers they have."""

    async def answer(self, sender: NodeId, request: PrefixKvFetch) -> PrefixKv:
        """Never raises for what a request asks."""
        if not self._may_ask(sender) or not self._store.loaded(request.model_id):
            return _ABSENT
        if self._n_waiting[sender] >= PEER_MAX or self._n_waiting.total() >= ALL_MAX:
            return _BUSY
        self._n_waiting[sender] += 1
        try:
            with trio.move_on_after(self._timeout_s):
                return await self._rows(request)
            return _BUSY
        except SwarmLLMError as error:
            provoked_by(log, sender).info("kept KV is not given to %s: %s", sender, error.message)
            return _ABSENT
        finally:
            self._n_waiting[sender] -= 1
            if not self._n_waiting[sender]:
                del self._n_waiting[sender]

    async def _rows(self, request: PrefixKvFetch) -> PrefixKv:
        model, n_layers = await self._model(request.model_id)
        layers = self._held(request, n_layers)
        if layers is None:
            return _ABSENT
        scope = "" if request.scope is UNSET or request.scope == self._node_id else request.scope
        other_format: bool | UnsetType = UNSET
        export = partial(
            self._store.export_prefix,
            model,
            layers,
            request.names,
            scope,
            first_row=request.first_row,
            n_rows=request.n_rows,
            part=None if request.layers is UNSET else LayerRange(*request.layers),
            rounds=request.takes == "q8_0",
        )
        if request.first_row:
            snapshot, data = await export()
        else:
            # At once, or slices that are asked for after the first one would be read before it.
            look_up = partial(self._store.look_up_prefix, model, layers, request.names, scope)
            known, (snapshot, data) = await _both(look_up, export)
            other_format = known.kv_format != request.kv_format or (
                request.takes == "q8_0" and known.kv_type != "q8_0"
            )
            is_known = known.kv_encoding is not UNSET and known.kv_encoding == request.kv_encoding
            if other_format and (request.takes is UNSET or not is_known):
                return _ABSENT
        if not snapshot.n_blocks and await self._one_ends(request):
            snapshot, data = await export()
        if not snapshot.n_blocks or len(data) > PREFIX_KV_MAX:
            return _ABSENT
        self._counts.prefix_given_bytes += len(data)
        digest = bytes.fromhex(snapshot.digest)
        return PrefixKv(status="ok", digest=digest, data=memoryview(data), other_format=other_format or UNSET)

    async def _one_ends(self, request: PrefixKvFetch) -> bool:
        """Whether a request of the origin that named the rows has ended now."""
        if request.scope is UNSET or self._requests is None:
            return False
        with trio.move_on_after(ENDING_S):
            return await self._requests.next_end(request.scope, request.model_id)
        return False

    def _held(self, request: PrefixKvFetch, n_layers: int) -> LayerRange | None:
        """The layers of which the names are; None: they are not loaded here. Names that an origin gave to a
        stage are known to the two of them only: who has them was sent by the origin."""
        if request.held is UNSET:
            return whole_range(self._store, request.model_id, n_layers)
        layers = LayerRange(*request.held)
        is_here = layers.end <= n_layers and covers(self._store.loaded(request.model_id), layers)
        return layers if is_here else None

    async def _model(self, model_id: ModelId) -> tuple[ModelFile, int]:
        found = self._models.get(model_id)
        if found is None:
            entry = await self._own_models.get(model_id)
            found = self._models[model_id] = ModelFile.of(entry), entry.manifest.n_layers
            while len(self._models) > MODELS_MAX:
                del self._models[next(iter(self._models))]
        return found


async def _both(
    one: Callable[[], Awaitable[First]], other: Callable[[], Awaitable[Second]]
) -> tuple[First, Second]:
    """What both give, at once. Raises SwarmLLMError of either."""
    found: list[First] = []
    failures: list[SwarmLLMError] = []

    async def ask_one() -> None:
        try:
            found.append(await one())
        except SwarmLLMError as error:
            failures.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_one)
        try:
            second = await other()
        except SwarmLLMError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return found[0], second
