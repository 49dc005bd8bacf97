"""A swarm in one process: real pipelines over the in-memory router, on a model that is arithmetic.

The arithmetic is chosen so that mistakes show: every layer adds what earlier rows of the same request left
behind (a KV cache, kept per layer and position) and multiplies, so a row that is lost, repeated out of
place, computed by the wrong layers or in the wrong order changes every token after it. All values are small
integers, exact in float32.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import trio

from swarmllm.errors import ContextFull, WorkerError
from swarmllm.models.catalogue import Catalogue, CatalogueEntry
from swarmllm.models.hashing import FileState
from swarmllm.models.layers import LayerRange
from swarmllm.models.manifest import Manifest
from swarmllm.pipeline.pipelines import Pipelines
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.swarm.memory import InMemoryNetwork, InMemoryRouter
from swarmllm.swarm.registry import Registry
from swarmllm.swarm.registry_feed import follow_router
from swarmllm.swarm.trust_keeper import Trust
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.codec import encode_record
from swarmllm_proto.ipc import Effort, GenerateDone, Sampling, Token
from swarmllm_proto.swarm import NodeRecord, ShardAnnounce
from swarmllm_proto.tensors import Tensor

N_LAYERS = 12
N_EMBD = 4
PRIME = 997
N_CTX = 4096
DEFAULTS = PipelineSettings()


def fake_entry(name: str = "arithmetic", cut_alignment: int = 1) -> CatalogueEntry:
    manifest = Manifest(
        name=name,
        architecture="arithmetic",
        n_layers=N_LAYERS,
        n_embd=N_EMBD,
        n_vocab=PRIME,
        context_length=N_CTX,
        cut_alignment=cut_alignment,
        whole_reason="",
        tied_embedding=False,
        size_bytes=1,
        shards=(),
    )
    return CatalogueEntry(manifest.model_id, name, Path("/nowhere/model.gguf"), manifest, FileState(1, 1))


class FakeCatalogue:
    def __init__(self, entry: CatalogueEntry) -> None:
        self.entry = entry

    def get(self, name_or_id: str) -> CatalogueEntry:
        if name_or_id not in (self.entry.model_id, self.entry.name):
            raise WorkerError("unknown model")
        return self.entry


@dataclass
class _Slot:
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    """By (layer, position)."""
    names: dict[tuple[str, str], list[bytes]] = field(default_factory=dict)
    """By (scope, layers)."""
    n_sampled: int = 0
    sampling: Sampling | None = None


class FakePool:
    """The part of WorkerPool that pipelines use."""

    def __init__(self, *ranges: str) -> None:
        self.ranges = tuple(LayerRange.parse(text) for text in ranges)
        self.slots: dict[str, _Slot] = {}
        self.kept: dict[tuple[str, str, bytes], dict[tuple[int, int], int]] = {}
        """Rows of blocks by (scope, layers, name)."""
        self.calls: list[tuple[Any, ...]] = []
        self.before_forward: Callable[[int, LayerRange], Awaitable[None]] | None = None
        """(position, layers); may wait or raise."""

    def loaded(self, model_id: str) -> tuple[LayerRange, ...]:
        return self.ranges

    def context_sizes(self) -> dict[str, int]:
        return {}

    async def tokenize(
        self,
        model: ModelFile,
        *,
        text: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        effort: Effort | None = None,
    ) -> Tensor:
        await trio.lowlevel.checkpoint()
        return np.array([ord(character) % PRIME for character in text or ""], np.int32)

    async def embed(self, model: ModelFile, tokens: Tensor) -> Tensor:
        await trio.lowlevel.checkpoint()
        self.calls.append(("embed", len(tokens)))
        return _embedded(tokens)

    async def forward(
        self,
        model: ModelFile,
        *,
        request_id: str,
        layers: LayerRange,
        position: int,
        tensor: Tensor,
        want: Literal["hidden", "none", "token"],
        sampling: Sampling | None = None,
        n_prompt_tokens: int = 0,
        generated: tuple[int, ...] = (),
        ring: Any = None,
    ) -> SimpleNamespace:
        slot = self.slots.setdefault(request_id, _Slot())
        await trio.lowlevel.checkpoint()
        if self.before_forward is not None:
            await self.before_forward(position, layers)
        self.calls.append(("forward", str(layers), position, len(tensor), want))
        if position + len(tensor) > N_CTX:
            raise ContextFull("the context is full")
        rows = _embedded(tensor) if tensor.dtype == np.int32 else tensor
        hidden = self._run(slot, layers, position, rows)
        token, piece = None, b""
        if want == "token":
            if slot.sampling is None:
                slot.n_sampled = len(generated)
            slot.sampling = sampling or slot.sampling
            assert slot.sampling is not None, "sampling comes with the first token"
            token, piece = self._sample(slot, request_id, hidden[-1])
        return SimpleNamespace(
            tensor=hidden if want == "hidden" else None,
            token=token,
            piece=piece,
            compute_s=0.001,
            onward=False,
        )

    @asynccontextmanager
    async def generate(
        self,
        model: ModelFile,
        *,
        request_id: str,
        tokens: Tensor,
        sampling: Sampling,
        n_generated: int = 0,
        session: str = "",
    ) -> AsyncIterator[FakeStream]:
        stream = FakeStream(self, model, request_id, tokens, sampling, n_generated)
        try:
            yield stream
        finally:
            self.slots.pop(request_id, None)

    async def cancel(self, model_id: str, request_id: str) -> None:
        await trio.lowlevel.checkpoint()
        if (slot := self.slots.pop(request_id, None)) is not None:
            self._keep(slot)

    async def name_prefix(
        self, model: ModelFile, *, request_id: str, layers: LayerRange, names: bytes, scope: str
    ) -> int:
        """Rows are kept when their request is cancelled, for any later one with the same names."""
        await trio.lowlevel.checkpoint()
        slot = self.slots.setdefault(request_id, _Slot())
        slot.names[scope, str(layers)] = [names[at : at + 32] for at in range(0, len(names), 32)]
        has_begun = any(layer in range(layers.start, layers.end) for layer, _ in slot.rows)
        n_blocks = 0
        for i, name in enumerate(slot.names[scope, str(layers)]):
            kept = self.kept.get((scope, str(layers), name))
            if kept is None or (has_begun and not kept.items() <= slot.rows.items()):
                break
            slot.rows |= kept
            n_blocks = i + 1
        return n_blocks

    def _keep(self, slot: _Slot) -> None:
        for (scope, layers), names in slot.names.items():
            wanted = LayerRange.parse(layers)
            for i, name in enumerate(names):
                block = [
                    (layer, position)
                    for layer in range(wanted.start, wanted.end)
                    for position in range(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)
                ]
                if all(row in slot.rows for row in block):
                    self.kept[scope, layers, name] = {row: slot.rows[row] for row in block}

    def _run(self, slot: _Slot, layers: LayerRange, position: int, rows: Tensor) -> Tensor:
        hidden = rows.astype(np.int64)
        for layer in range(layers.start, layers.end):
            for known in [key for key in slot.rows if key[0] == layer and key[1] >= position]:
                del slot.rows[known]
            past = [slot.rows.get((layer, earlier)) for earlier in range(position)]
            if None in past:
                raise WorkerError(f"layer {layer} has no row {past.index(None)}", kind="position_gap")
            memory = sum(cast(list[int], past))
            for index in range(len(hidden)):
                left_behind = int(hidden[index].sum()) % PRIME
                slot.rows[layer, position + index] = left_behind
                hidden[index] = (hidden[index] * (layer + 3) + memory + layer + np.arange(N_EMBD)) % PRIME
                memory += left_behind
        return hidden.astype(np.float32)

    def _sample(self, slot: _Slot, request_id: str, row: Tensor) -> tuple[Token, bytes]:
        assert slot.sampling is not None
        # Depends on how often the slot has sampled, as a seeded sampler does: sampling twice shows.
        token_id = (int(row.sum()) + slot.n_sampled) % PRIME
        index, slot.n_sampled = slot.n_sampled, slot.n_sampled + 1
        ends = slot.n_sampled >= slot.sampling.max_tokens
        token = Token(
            id=0,
            request_id=request_id,
            index=index,
            token=token_id,
            finish_reason="length" if ends else None,
            compute_s=0.001,
        )
        return token, f"{token_id} ".encode()


class FakeStream:
    def __init__(
        self,
        pool: FakePool,
        model: ModelFile,
        request_id: str,
        tokens: Tensor,
        sampling: Sampling,
        n_generated: int,
    ) -> None:
        self.done: GenerateDone | None = None
        self._steps = self._run(pool, model, request_id, tokens, sampling, n_generated)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> tuple[Token, bytes]:
        return await self._steps.__anext__()

    async def _run(
        self,
        pool: FakePool,
        model: ModelFile,
        request_id: str,
        tokens: Tensor,
        sampling: Sampling,
        n_generated: int,
    ) -> AsyncIterator[tuple[Token, bytes]]:
        position, rows = 0, tokens
        generated = tuple(tokens[len(tokens) - n_generated :].tolist())
        while True:
            result = await pool.forward(
                model,
                request_id=request_id,
                layers=LayerRange(0, N_LAYERS),
                position=position,
                tensor=rows,
                want="token",
                sampling=sampling,
                n_prompt_tokens=len(tokens) - n_generated,
                generated=generated,
            )
            yield result.token, result.piece
            if result.token.finish_reason:
                return
            position, rows = position + len(rows), np.array([result.token.token], np.int32)


@dataclass
class FakeNode:
    node_id: str
    router: InMemoryRouter
    registry: Registry
    pool: Any
    pipelines: Pipelines
    stop: Callable[[], None]
    trust: Trust

    async def announce(self, entry: CatalogueEntry, ranges: Sequence[LayerRange]) -> None:
        announced = ShardAnnounce(
            model_id=entry.model_id,
            name=entry.name,
            n_layers=entry.manifest.n_layers,
            ranges=tuple((layers.start, layers.end) for layers in ranges),
        )
        record = NodeRecord(
            node_id=self.node_id, nickname=f"nick-{self.node_id}", models=(announced,) if ranges else ()
        )
        await self.router.publish(encode_record(record))


class Swarm:
    """Nodes "a", "b" ... of one in-memory network."""

    def __init__(
        self,
        network: InMemoryNetwork,
        entry: CatalogueEntry,
        start: Callable[[str, Any], Awaitable[FakeNode]],
    ) -> None:
        self.network = network
        self.entry = entry
        self.nodes: dict[str, FakeNode] = {}
        self._start = start

    def __getitem__(self, node_id: str) -> FakeNode:
        return self.nodes[node_id]

    async def start(self, node_id: str, pool: Any) -> None:
        """A new node, or one that was killed, with a memory as empty as `pool`."""
        node = await self._start(node_id, pool)
        await node.announce(self.entry, pool.loaded(self.entry.model_id))
        self.nodes[node_id] = node

    def kill(self, node_id: str) -> None:
        self.network.kill(node_id)
        self.nodes.pop(node_id).stop()

    async def quiet(self) -> None:
        """Wait until no node has a request or a slot left."""
        with trio.fail_after(10):
            while any(_busy(node) for node in self.nodes.values()):
                await trio.lowlevel.checkpoint()


@asynccontextmanager
async def open_swarm(
    holdings: Mapping[str, Any],
    *,
    settings: PipelineSettings | Mapping[str, PipelineSettings] = DEFAULTS,
    entry: CatalogueEntry | None = None,
) -> AsyncIterator[Swarm]:
    """A connected swarm in which everybody knows what everybody holds. `holdings`: by node id."""
    entry = entry or fake_entry()
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(InMemoryNetwork())
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)

        async def start(node_id: str, pool: Any) -> FakeNode:
            own = settings[node_id] if isinstance(settings, Mapping) else settings
            return await _start_node(nursery, network.add(node_id), pool, entry, own)

        swarm = Swarm(network, entry, start)
        for node_id, pool in holdings.items():
            await swarm.start(node_id, pool)
        with trio.fail_after(5):
            while any(len(node.registry.nodes()) < len(holdings) for node in swarm.nodes.values()):
                await trio.lowlevel.checkpoint()
        yield swarm


async def _start_node(
    nursery: trio.Nursery,
    router: InMemoryRouter,
    pool: Any,
    entry: CatalogueEntry,
    settings: PipelineSettings,
) -> FakeNode:
    trust = Trust()
    registry = Registry(router.node_id, trust.may_work)
    catalogue = cast(Catalogue, FakeCatalogue(entry))
    pipelines = Pipelines(router, registry, pool, catalogue, router.node_id, settings, note=trust.note)
    scope = trio.CancelScope()

    async def run(*, task_status: Any) -> None:
        with scope:
            async with trio.open_nursery() as own:
                await own.start(follow_router, registry, router)
                await own.start(pipelines.run)
                task_status.started()

    await nursery.start(run)
    return FakeNode(router.node_id, router, registry, pool, pipelines, scope.cancel, trust)


def _busy(node: FakeNode) -> bool:
    statistics = node.pipelines.statistics()
    return bool(
        statistics.active_generations or statistics.active_stage_requests or getattr(node.pool, "slots", None)
    )


def _embedded(tokens: Tensor) -> Tensor:
    return ((tokens[:, None].astype(np.int64) * 7 + np.arange(N_EMBD)) % PRIME).astype(np.float32)


async def uncut(prompt: str, n_tokens: int) -> str:
    """What one pool with every layer answers."""
    pool, entry = FakePool(f"0:{N_LAYERS}"), fake_entry()
    model = ModelFile(entry.model_id, entry.path)
    tokens = await pool.tokenize(model, text=prompt)
    text = b""
    async with pool.generate(
        model, request_id="uncut", tokens=tokens, sampling=Sampling(max_tokens=n_tokens)
    ) as stream:
        async for _, piece in stream:
            text += piece
    return text.decode()
