"""Three honest nodes and a liar in one process: the real node, registry, pipelines, HTTP answers and metrics
over the in-memory router, on a model that is arithmetic, under a clock of their own.

A node here is a whole `Node` with all it has but workers (`bench.common.arithmetic` computes) and a
network. After each lie `LyingSwarm` asks every honest node, looks at what its dashboard, metrics and plan
say, and raises `Broken` where anything is not as it was: an answer missing or wrong, a task ended, a slot
not freed, an honest node trusted less, a traceback or too much in the log.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import trio
from libp2p.peer.id import ID

from bench.common.arithmetic import FakePool, uncut
from bench.lying.liar import Liar, Lie
from bench.lying.untruths import World
from swarmllm.api.http.app import App, create_app
from swarmllm.config import Config, InferenceTable
from swarmllm.downloads import SharedDigests
from swarmllm.errors import SwarmLLMError
from swarmllm.guide import GUIDE_PATH
from swarmllm.log_filter import LogLimitFilter
from swarmllm.models import Catalogue, Store
from swarmllm.models.hashing import build_manifest
from swarmllm.node import Node
from swarmllm.node.remembered_loads import open_remembered_loads
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.pipelines import Pipelines
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.in_memory.router import InMemoryRouter
from swarmllm.swarm.in_memory.signer import InMemorySigner
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm.swarm.peers.trust_keeper import Trust
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm.transfer import ModelTransfer, TransferSettings
from swarmllm.workerpool import LoadOptions, WorkerStatistics
from swarmllm.workerpool.gpus import KnownGpus
from swarmllm.workerpool.settings import ModelMemory
from swarmllm_proto.ipc import Sampling

PROMPT: Final = "where do the layers live, and who says so?"
N_TOKENS: Final = 8
HOLDINGS: Final = {0: "0:4", 1: "4:8", 2: "8:12"}
N_LIARS: Final = 8
"""Identities that take turns: trust is as it was before each."""
LIE_S: Final = 300.0
"""By trio's clock: how long an answer may take while somebody lies in the middle of it."""
ANSWER_S: Final = 5.0
"""The same when the liar has left. Nothing takes time on this clock but waiting."""
SETTLE_S: Final = 30.0
LOG_LINES_MAX: Final = 400
"""In one lie, of all three nodes."""
SLOWER_MAX: Final = 2.0
"""Forwards of an answer, of what it takes without a liar."""
PAGES: Final = (
    "/v1/models",
    "/api/admin/stats",
    "/api/admin/models",
    "/api/admin/peers",
    "/api/admin/plan?model=guide",
    "/metrics",
    "/health",
)
PAGE_MAX_BYTES: Final = 2**20


class Broken(Exception):
    """What a lie did that it must not do."""


class NodePool(FakePool):
    """What the node asks of its pool, besides what its pipelines do."""

    def __init__(self, model_id: str, n_embd: int, layers: str) -> None:
        super().__init__(layers, n_embd=n_embd)
        self._model_id = model_id
        self.gpus = KnownGpus(is_used=False)

    def models(self) -> dict[str, Any]:
        return {self._model_id: self.ranges}

    def loaded(self, model_id: str) -> Any:
        return self.ranges if model_id == self._model_id else ()

    def kept_prefixes(self) -> dict[str, Any]:
        return {}

    def memory(self, model_id: str) -> ModelMemory:
        return ModelMemory()

    def free_bytes(self) -> int | None:
        return None

    def loaded_with(self, model_id: str) -> LoadOptions | None:
        return None

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        return ()


@dataclass
class HonestNode:
    node: Node
    router: InMemoryRouter
    pool: NodePool
    pipelines: Pipelines
    trust: Trust
    app: App

    @property
    def n_forwards(self) -> int:
        return sum(call[0] == "forward" for call in self.pool.calls)


class Journal(logging.Handler):
    """What a daemon would have logged, and whether a traceback was among it."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = LogLimitFilter(clock=trio.current_time)
        self.n_lines = 0
        self.tracebacks: list[str] = []
        self.latest: deque[str] = deque(maxlen=40)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.tracebacks.append(logging.Formatter().format(record))
        if self._limit.filter(record):
            self.n_lines += 1
            self.latest.append(f"{record.levelname} {record.name}: {record.getMessage()[:300]}")

    def clear(self) -> None:
        self.n_lines = 0
        self.tracebacks.clear()
        self.latest.clear()


@contextmanager
def journal() -> Iterator[Journal]:
    """Everything from level INFO on that the limit of lines leaves, on the clock of the run."""
    handler, root = Journal(), logging.getLogger()
    level, root.level = root.level, logging.INFO
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def node_id_of(number: int) -> str:
    """A peer id as Ed25519 keys have them; nobody needs the key in memory."""
    return str(ID(bytes((0, 36, 8, 1, 0x12, 32)) + number.to_bytes(32, "big")))


@cache
def guide_world() -> World:
    """What lies are drawn for: the bundled model, and symbols for nodes."""
    manifest = build_manifest(GUIDE_PATH)
    return World(manifest.model_id, manifest.n_layers, manifest.n_vocab, manifest.n_embd)


def world_of(liar: int) -> World:
    return replace(
        guide_world(),
        own_id=node_id_of(1000 + liar),
        honest_ids=tuple(map(node_id_of, HOLDINGS)),
        addresses=tuple(f"/ip4/127.0.0.1/tcp/{9000 + i}" for i in HOLDINGS),
    )


@dataclass
class LyingSwarm:
    network: InMemoryNetwork
    nodes: list[HonestNode]
    log: Journal
    years: list[int]
    """How many have passed for trust: a fault is not held against an identity that lies anew."""
    text: str = ""
    n_forwards: int = 0
    """Of one answer at each node, all three together."""
    _n_told: int = 0

    async def tell(self, lie: Lie) -> None:
        """Raises Broken."""
        self.log.clear()
        world = world_of(self._n_told % N_LIARS)
        self._n_told += 1
        router = self.network.add(world.own_id)
        async with trio.open_nursery() as nursery:
            liar = Liar(router, world, lie, router.start, live=self._live)
            liar.serve()
            await liar.announce()
            await self._meet(world)
            nursery.start_soon(liar.tell)
            try:
                await self._ask_all(LIE_S, liar)
                await self._look()
            finally:
                nursery.cancel_scope.cancel()
                self.network.kill(world.own_id)
        await self._settle()
        for node in self.nodes:
            node.pool.calls.clear()
            node.pool.checked.clear()
        await self._ask_all(ANSWER_S, None)
        n_forwards = sum(node.n_forwards for node in self.nodes)
        if n_forwards > SLOWER_MAX * self.n_forwards:
            raise Broken(f"{n_forwards} forwards where {self.n_forwards} are usual")
        await self._settle()
        self._judge()
        self.years[0] += 1

    async def begin(self) -> None:
        self.text = (await uncut(PROMPT, N_TOKENS, n_embd=self.nodes[0].pool.n_embd)).strip()
        await self._settle()
        await self._ask_all(ANSWER_S, None)
        for node in self.nodes:
            node.pool.calls.clear()
            node.pool.checked.clear()
        await self._ask_all(ANSWER_S, None)
        self.n_forwards = sum(node.n_forwards for node in self.nodes)

    async def _meet(self, world: World) -> None:
        """The record has come everywhere."""
        with trio.fail_after(ANSWER_S):
            while any(  # noqa: ASYNC110 - a clock that jumps
                world.own_id not in node.router.connected() for node in self.nodes
            ):
                await trio.sleep(0.01)
            await trio.sleep(0.1)

    def _live(self) -> str | None:
        found = [request_id for node in self.nodes for request_id in node.pipelines._sessions.by_request]
        return found[0] if found else None

    async def _ask_all(self, within_s: float, liar: Liar | None) -> None:
        async with trio.open_nursery() as nursery:
            for index, node in enumerate(self.nodes):
                nursery.start_soon(self._ask, index, node, within_s, liar)

    async def _ask(self, index: int, node: HonestNode, within_s: float, liar: Liar | None) -> None:
        text = ""
        began_s = trio.current_time()
        try:
            with trio.fail_after(within_s):
                async with node.node.generate(
                    "guide", Prompt(text=PROMPT), Sampling(max_tokens=N_TOKENS, temperature=0.0), N_TOKENS
                ) as generation:
                    text = "".join([piece.text async for piece in generation])
        except (SwarmLLMError, trio.TooSlowError) as error:
            took_s = trio.current_time() - began_s
            raise Broken(
                f"node {index} did not answer {'beside' if liar else 'after'} the lie ({took_s:.1f} s):"
                f" {type(error).__name__} {error}"
            ) from error
        may_differ = liar is not None and liar.n_accepted
        if text.strip() != self.text and not may_differ:
            raise Broken(f"node {index} answered {text!r} where {self.text!r} is due")

    async def _look(self) -> None:
        """What people see."""
        for index, node in enumerate(self.nodes):
            client = node.app.test_client()
            for page in PAGES:
                response = await client.get(page, headers={"Host": "localhost"})
                body = await response.get_data()
                if response.status_code != 200:
                    raise Broken(f"node {index}: {page} is {response.status_code}: {body[:300]!r}")
                if len(body) > PAGE_MAX_BYTES:
                    raise Broken(f"node {index}: {page} has {len(body)} bytes")
                if page != "/metrics":
                    json.loads(body, parse_constant=_no_constant)

    async def _settle(self) -> None:
        """No request and no slot is left."""
        with trio.move_on_after(SETTLE_S + 60):
            while True:
                left = [
                    (index, statistics.active_stage_requests, len(node.pool.slots))
                    for index, node in enumerate(self.nodes)
                    if (statistics := node.pipelines.statistics()).active_stage_requests or node.pool.slots
                ]
                if not left:
                    return
                await trio.sleep(0.5)
        raise Broken(f"not freed (node, requests of others, slots): {left}")

    def _judge(self) -> None:
        for index, node in enumerate(self.nodes):
            for other in self.nodes:
                score = node.trust.score(other.router.node_id)
                if score < NEUTRAL and other is not node:
                    explained = node.trust.explain(other.router.node_id)
                    raise Broken(f"node {index} trusts an honest one {score:.2f}: {explained.recent[:3]}")
        if self.log.tracebacks:
            raise Broken(f"a traceback in the log: {self.log.tracebacks[0][-1500:]}")
        if self.log.n_lines > LOG_LINES_MAX:
            raise Broken(f"{self.log.n_lines} lines in the log: {list(self.log.latest)[-5:]}")


def _no_constant(text: str) -> None:
    raise Broken(f"{text} in JSON")


@asynccontextmanager
async def open_lying_swarm(folder: Path) -> AsyncIterator[LyingSwarm]:
    """Three honest nodes that know each other."""
    async with AsyncExitStack() as stack:
        log = stack.enter_context(journal())
        network = await stack.enter_async_context(InMemoryNetwork())
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        years = [0]
        nodes = [
            await _start_node(nursery, network.add(node_id_of(i)), folder / str(i), layers, years)
            for i, layers in HOLDINGS.items()
        ]
        swarm = LyingSwarm(network, nodes, log, years)
        with trio.fail_after(60):
            while any(len(node.node.peers()) < len(nodes) - 1 for node in nodes):  # noqa: ASYNC110
                await trio.sleep(0.1)
        await trio.sleep(2)
        await swarm.begin()
        yield swarm


async def _start_node(
    nursery: trio.Nursery, router: InMemoryRouter, folder: Path, layers: str, years: Sequence[int]
) -> HonestNode:
    await trio.to_thread.run_sync(partial(folder.mkdir, parents=True))
    config = Config(inference=InferenceTable(max_concurrent_requests=8))
    catalogue = Catalogue(folder / "catalogue.sqlite")
    entry = await trio.to_thread.run_sync(catalogue.ensure, GUIDE_PATH, "guide")
    pool = NodePool(entry.model_id, entry.manifest.n_embd, layers)
    pool.n_vocab = entry.manifest.n_vocab
    trust = Trust(clock=lambda: 1e9 * (1 + years[0]) + trio.current_time())
    registry = Registry(router.node_id, trust)
    await nursery.start(follow_router, registry, router)
    observations = Observations()
    transfer = ModelTransfer(
        router,
        registry,
        Store(catalogue, folder / "models"),
        TransferSettings(),
        in_use=pool.models,
        on_change=lambda: node.holdings_changed(),
        note=trust.note,
    )
    gathering = SharedDigests(folder / "downloads", router, transfer, may_believe=trust.may_work)
    await nursery.start(gathering.run)
    pipelines = Pipelines(
        router,
        registry,
        pool,
        catalogue,
        router.node_id,
        PipelineSettings(prefill_chunk_tokens=16, check_rate=0.25),
        pieces=transfer,
        digests=gathering,
        observations=observations,
        trust=trust,
        signer=InMemorySigner(router.node_id),
    )
    await nursery.start(pipelines.run)
    node = Node(
        config,
        router=router,
        registry=registry,
        pool=pool,  # type: ignore[arg-type]
        catalogue=catalogue,
        pipelines=pipelines,
        transfer=transfer,
        gathering=gathering,
        observations=observations,
        trust=trust,
        remembered=open_remembered_loads(folder),
    )
    await nursery.start(node.run)
    await node.start()
    return HonestNode(node, router, pool, pipelines, trust, create_app(node, config))
