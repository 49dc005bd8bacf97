"""A real Node whose machinery below is ours: pipelines that play a script, a pool that only remembers.

Everything from HTTP down to `Node` is the real thing, and so are router (in memory), registry and catalogue.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Container
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import trio
from deadlines import DEADLINE_S
from node_ids import NODE_A, B, C, node_id_named

from swarmllm.api.http.app import create_app
from swarmllm.api.http.endpoint import open_api
from swarmllm.api.http.limits import HttpLimits
from swarmllm.config import ApiTable, Config, InferenceTable, NodeTable
from swarmllm.downloads import SharedDigests
from swarmllm.errors import Conflict, SwarmLLMError
from swarmllm.guide import GUIDE_PATH
from swarmllm.models import Catalogue, CatalogueEntry, LayerRange, Store, merge, subtract
from swarmllm.node import Node
from swarmllm.node.remembered_loads import open_remembered_loads
from swarmllm.pipeline.origin.generation import (
    GeneratedText,
    Prompt,
    PromptScores,
    SpeculationCounts,
    StageReport,
    Timings,
)
from swarmllm.pipeline.origin.prompt_rows import Rows
from swarmllm.pipeline.origin.prompts import Prompts
from swarmllm.pipeline.route.route_planner import RequestSize
from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.capacity import Room
from swarmllm.pipeline.stage.served import Served
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.pipeline.vision.encoders import Encoders
from swarmllm.scheduling.cost import NodeSpeed, RouteInputs, Workload
from swarmllm.scheduling.plan import Plan, make_plan
from swarmllm.swarm.byte_budget import ByteBudget
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.in_memory.router import InMemoryRouter
from swarmllm.swarm.peers.trust import NeutralTrust
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm.transfer import ModelTransfer, TransferSettings
from swarmllm.workerpool import AS_CONFIGURED, LoadOptions, WorkerStatistics
from swarmllm.workerpool.gpus import KnownGpus
from swarmllm.workerpool.settings import ModelMemory
from swarmllm_proto.codec import encode_record
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import GuessCount, InfillTokens, Sampling, TokenLogprob
from swarmllm_proto.swarm import KeptPrefix, NodeRecord, ShardAnnounce, Stage


@dataclass
class Script:
    """What the next generations do."""

    texts: list[str] = field(default_factory=lambda: ["Hello", " there", "."])
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    """Of the texts."""
    prompt: PromptScores | None = None
    finish_reason: str = "stop"
    stop_sequence: str | None = None
    fail_before: SwarmLLMError | None = None
    fail_after: int | None = None
    """Raise `failure` after this many texts."""
    failure: Exception | None = None
    hold_after: int | None = None
    """Wait for ever after this many texts."""
    between: Callable[[], Any] | None = None
    """Awaited before each text."""
    is_exact: bool = True


class FakeGeneration:
    def __init__(self, script: Script, queue_s: float, *, is_apart: bool = False) -> None:
        self._script = script
        self.is_apart = is_apart
        self.shape = "local"
        self.n_cached_tokens = 4
        self.fetched = None
        self.looked = ()
        self.guesses = SpeculationCounts((GuessCount("lookup", 6, 5),))
        self.n_recoveries = 0
        self.n_rebuilt = 0
        self.is_exact = script.is_exact
        self.recovery_s = 0.0
        self.route = (StageReport(NODE_A, "küche", LayerRange(0, 12), compute_s=0.002, prefill_s=0.01),)
        self.timings = Timings(queue_s, tokenize_s=0.001, prefill_s=0.01, decode_s=0.5)
        self.n_prompt_tokens = 7
        self.prompt = script.prompt
        self.n_generated = 0
        self.finish_reason: str | None = None
        self.stop_sequence: str | None = None

    async def __aiter__(self) -> AsyncIterator[GeneratedText]:
        script = self._script
        for i, text in enumerate(script.texts):
            if i == script.hold_after:
                await trio.sleep_forever()
            if i == script.fail_after and script.failure is not None:
                raise script.failure
            await (script.between or trio.lowlevel.checkpoint)()
            self.n_generated += 1
            logprobs = script.logprobs[i] if script.logprobs else ()
            yield GeneratedText(text, i, 100 + i, None, logprobs)
        self.finish_reason, self.stop_sequence = script.finish_reason, script.stop_sequence


@dataclass
class Call:
    prompt: Prompt
    entry: CatalogueEntry
    sampling: Sampling
    ended: trio.Event = field(default_factory=trio.Event)
    outcome: str = "running"


class FakePipelines:
    def __init__(self, pool: FakePool, router: InMemoryRouter, registry: Registry) -> None:
        settings, counts = PipelineSettings(), PipelineStatistics()
        self.encoders = Encoders(
            pool,  # type: ignore[arg-type]
            router,
            registry,
            settings,
            counts,
            NeutralTrust(),
            ByteBudget(),
            Suspects(),
            self,
        )
        self.prompts = Prompts(pool, self.encoders, settings)  # type: ignore[arg-type]
        self.script = Script()
        self.calls: list[Call] = []
        self.exact_rows: list[bool] = []
        """Whether each text's rows were to be exact."""
        self.started = trio.Event()
        self.computed: tuple[Served, ...] = ()
        self.commits = False

    @asynccontextmanager
    async def generate(
        self, prompt: Prompt, entry: CatalogueEntry, sampling: Sampling, *, request_id: str, queue_s: float
    ) -> AsyncIterator[FakeGeneration]:
        call = Call(prompt, entry, sampling)
        self.calls.append(call)
        self.started.set()
        if self.script.fail_before is not None:
            raise self.script.fail_before
        try:
            yield FakeGeneration(self.script, queue_s, is_apart=sampling.exact)
            call.outcome = "completed"
        except BaseException as error:
            call.outcome = type(error).__name__
            raise
        finally:
            call.ended.set()

    async def stages_for(self, entry: CatalogueEntry) -> tuple[Stage, ...]:
        return (Stage(node_id=NODE_A, start=0, end=entry.manifest.n_layers),)

    async def rows(
        self, tokens: Any, entry: CatalogueEntry, *, request_id: str, is_exact: bool = False
    ) -> Rows:
        await trio.lowlevel.checkpoint()
        self.exact_rows.append(is_exact)
        return Rows(np.ones((len(tokens), entry.manifest.n_embd), np.float32), ())

    def statistics(self) -> PipelineStatistics:
        return PipelineStatistics(generations=len(self.calls))

    def may_hand_over(self) -> bool:
        return False

    def are_layers_in_use(self, model_id: ModelId | None = None, layers: LayerRange | None = None) -> bool:
        return False

    def served(self) -> tuple[Served, ...]:
        return self.computed

    def served_tokens(self) -> dict[ModelId, int]:
        return {each.model_id: each.n_tokens for each in self.computed}

    def used_by_others_s(self, _model_id: ModelId) -> float:
        return -math.inf

    def room(self) -> Room:
        return Room(8, 8, 4096)

    async def plan(self, entry: CatalogueEntry, size: RequestSize) -> Plan:
        """A real plan for made-up nodes."""
        held = {NODE_A: [LayerRange(0, 4)], B: [LayerRange(4, 12)], C: [LayerRange(4, 12)]}
        speed = NodeSpeed(0.001, 0.0001, is_measured=True)
        known = RouteInputs(
            NODE_A,
            Workload(size.n_prompt_tokens, size.n_output_tokens, 1024),
            {NODE_A: speed, B: speed, C: NodeSpeed(0.002, 0.0002)},
            {"b": 0.002, "c": 0.002},
        )
        plan = make_plan(entry.manifest.n_layers, 1, held, known)
        assert plan is not None
        return plan


class FakePool:
    def __init__(self) -> None:
        self.held: dict[str, tuple[LayerRange, ...]] = {}
        self.forgotten: list[str] = []
        self.infill: InfillTokens | None = None
        self.failure: SwarmLLMError | None = None
        self.refused: Container[str] = ()
        self.options: dict[str, LoadOptions] = {}
        self.cuts = SimpleNamespace(tries_listed=False)

    def is_projector_open(self, model_id: str, projector: Any) -> bool:
        return False

    def kept_prefixes(self) -> dict[str, tuple[KeptPrefix, ...]]:
        return {}

    async def load(
        self,
        model: Any,
        layers: LayerRange,
        progress: Any,
        options: LoadOptions = AS_CONFIGURED,
        then: Any = None,
    ) -> tuple[LayerRange, ...]:
        if progress is not None:
            progress(50, 100)
        await trio.lowlevel.checkpoint()
        if self.failure is not None and (not self.refused or model.model_id in self.refused):
            raise self.failure
        self.held[model.model_id] = merge([*self.loaded(model.model_id), layers])
        self.options[model.model_id] = options
        if then is not None:
            await then()
        return self.held[model.model_id]

    async def serves_without_file(self, model: Any) -> bool:
        return bool(self.loaded(model.model_id))

    async def forget(self, model_id: str) -> None:
        self.held.pop(model_id, None)
        self.forgotten.append(model_id)

    async def unload(
        self, model_id: str, layers: LayerRange, progress: Any, then: Any = None
    ) -> tuple[LayerRange, ...]:
        if progress is not None:
            progress(70, 70)
        await trio.lowlevel.checkpoint()
        if not any(layers.overlaps(held) for held in self.loaded(model_id)):
            raise Conflict(f"layers {layers} are not loaded here", field="layers")
        self.held[model_id] = subtract(self.loaded(model_id), [layers])
        if then is not None:
            await then()
        return self.held[model_id]

    async def tokenize(
        self,
        model: Any,
        *,
        text: str | None = None,
        messages: Any = None,
        tools: Any = None,
        effort: Any = None,
        template: str = "",
        place: str = "whole",
    ) -> Any:
        """A token per byte, after a token that begins every text."""
        await trio.lowlevel.checkpoint()
        data = (text if text is not None else repr(messages)).encode()
        return np.array([*([1] if place != "later" else []), *data], np.int32)

    async def pieces(self, model: Any, tokens: Any) -> tuple[bytes, ...]:
        """The token that begins a text adds nothing."""
        await trio.lowlevel.checkpoint()
        return tuple(b"" if token == 1 else bytes([token]) for token in tokens.tolist())

    async def end_tokens(self, model: Any) -> frozenset[int]:
        await trio.lowlevel.checkpoint()
        return frozenset({2, 3})

    def context_sizes(self) -> dict[str, int]:
        return {}

    async def infill_tokens(self, model: Any) -> InfillTokens | None:
        await trio.lowlevel.checkpoint()
        return self.infill

    async def check_grammar(self, model: Any, sampling: Any) -> None:
        await trio.lowlevel.checkpoint()

    async def detokenize(self, model: Any, tokens: Any) -> str:
        await trio.lowlevel.checkpoint()
        return bytes(tokens.tolist()).decode()

    async def apply_template(
        self,
        model: Any,
        messages: Any,
        tools: Any,
        effort: Any = None,
        template: str = "",
        *,
        is_to_answer: bool = True,
    ) -> str:
        await trio.lowlevel.checkpoint()
        said = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return template + said + "<assistant>" * is_to_answer

    def loaded_with(self, model_id: str) -> LoadOptions | None:
        return self.options.get(model_id) if self.loaded(model_id) else None

    def cut(self, model_id: str, layers: LayerRange, *, if_idle: bool = False) -> None:
        pass

    @property
    def gpus(self) -> KnownGpus:
        return KnownGpus(is_used=True)

    def kernel_class(self, model_id: str) -> str:
        return "fake" if self.loaded(model_id) else ""

    def memory(self, model_id: str) -> ModelMemory:
        return ModelMemory()

    def free_bytes(self) -> int | None:
        return None

    def loaded(self, model_id: str) -> tuple[LayerRange, ...]:
        return self.held.get(model_id, ())

    def models(self) -> dict[str, tuple[LayerRange, ...]]:
        return {model_id: ranges for model_id, ranges in self.held.items() if ranges}

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        return ()


@dataclass
class Stand:
    """A node on a stand: poke the parts below, look at what comes out above."""

    node: Node
    pipelines: FakePipelines
    pool: FakePool
    config: Config
    network: InMemoryNetwork
    router: InMemoryRouter
    registry: Registry
    catalogue: Catalogue
    url: str = ""
    http: httpx.AsyncClient = field(init=False)

    async def load_guide(self) -> None:
        entry, layers = await self.node.models.resolve("guide", None)
        await self.node.models.load(entry, layers, lambda done, total: None, lambda done, total: None)

    async def tell_of_peer(
        self, name: str, model: str, n_layers: int, ranges: tuple[tuple[int, int], ...]
    ) -> None:
        """Connect the node `node_id_named(name)`, which says it holds these layers, and wait until this one
        has heard it."""
        announced = ShardAnnounce(model_id="ab" * 32, name=model, n_layers=n_layers, ranges=ranges)
        node_id = node_id_named(name)
        record = NodeRecord(node_id=node_id, nickname=f"{name}'s name", models=(announced,))
        await self.network.add(node_id).publish(encode_record(record))
        with trio.fail_after(DEADLINE_S):
            while "ab" * 32 not in self.registry.models():
                await trio.lowlevel.checkpoint()


@asynccontextmanager
async def open_node(
    folder: Path,
    *,
    config: Config | None = None,
    pool_failure: SwarmLLMError | None = None,
    refused_models: Container[str] = (),
    strict: bool = False,
    **inference: Any,
) -> AsyncIterator[Stand]:
    """A started node with the guide in its catalogue; `inference`: keys of that table. The pool
    fails with `pool_failure`, of `refused_models` only where there are any."""
    config = config or Config(
        api=ApiTable(port=0, max_body_bytes=65536, strict=strict),
        inference=InferenceTable(**inference),
        node=NodeTable(data_dir=str(folder)),
    )
    await trio.Path(folder).mkdir(exist_ok=True)
    catalogue = Catalogue(folder / "catalogue.sqlite")
    await trio.to_thread.run_sync(catalogue.ensure, GUIDE_PATH, "guide")
    pool = FakePool()
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        router = network.add(NODE_A)
        registry = Registry(NODE_A)
        pipelines = FakePipelines(pool, router, registry)
        await nursery.start(follow_router, registry, router)
        transfer = ModelTransfer(
            router,
            registry,
            Store(catalogue, folder / "models"),
            TransferSettings(),
            in_use=pool.models,
            on_change=lambda: node.holdings_changed(),
        )
        node = Node(
            config,
            router=router,
            registry=registry,
            pool=pool,  # type: ignore[arg-type]
            catalogue=catalogue,
            pipelines=pipelines,  # type: ignore[arg-type]
            transfer=transfer,
            gathering=SharedDigests(folder / "downloads", router, transfer, may_believe=lambda node_id: True),
            remembered=open_remembered_loads(folder),
        )
        pool.failure, pool.refused = pool_failure, refused_models
        await nursery.start(node.downloads.run)
        await nursery.start(node.run)
        await node.start()
        yield Stand(node, pipelines, pool, config, network, router, registry, catalogue)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def serve_node(
    folder: Path, *, limits: HttpLimits | None = None, **inference: Any
) -> AsyncIterator[Stand]:
    """The same behind a real HTTP server on a free port."""
    async with (
        open_node(folder, **inference) as stand,
        open_api(stand.node, stand.config, limits=limits) as stand.url,
        httpx.AsyncClient(base_url=stand.url, trust_env=False, timeout=DEADLINE_S) as stand.http,
    ):
        yield stand


__all__ = ["FakeGeneration", "Script", "Stand", "create_app", "open_node", "serve_node"]
