"""The bundled model over real workers: honest stages are right to the bit, coarser weights are not."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import pytest
import trio
from deadlines import PATIENCE_S

from swarmllm.guide import GUIDE_PATH
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import NEUTRAL, Deed
from swarmllm.swarm.peers.trust_keeper import Trust
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling

from .fakes import Swarm, computes, open_swarm

pytestmark = pytest.mark.slow

A, B, C, D, M, N = (node_id_named(name) for name in "abcdmn")
HOLDINGS = {A: "0:4", B: "4:8", M: "4:8", N: "4:8", C: "8:12", D: "8:12"}
QUESTIONS = ("What is a pipeline?", "How do I load layers 0 to 4 of the guide?", "Who is the origin?")


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> CatalogueEntry:
    return Catalogue(tmp_path_factory.mktemp("catalogue") / "models.sqlite").ensure(GUIDE_PATH, "guide")


@asynccontextmanager
async def guide_swarm(folder: Path, entry: CatalogueEntry, weights_of_b: Path) -> AsyncIterator[Swarm]:
    """B and C are faster than the others that have their layers, and get the work."""
    async with AsyncExitStack() as stack:
        pools: dict[str, WorkerPool] = {}
        for node_id, layers in HOLDINGS.items():
            settings = WorkerSettings(cache_dir=folder / f"cache-{node_id}", n_ctx=1024, n_slots=4)
            pools[node_id] = WorkerPool(settings, folder / f"run-{len(pools)}")
            await stack.enter_async_context(pools[node_id].running())
            path = weights_of_b if node_id == B else entry.path
            await pools[node_id].load(ModelFile(entry.model_id, path), LayerRange.parse(layers))
        settings = PipelineSettings(prefill_chunk_tokens=16, n_ctx=1024, check_rate=0.2)
        swarm = await stack.enter_async_context(open_swarm(pools, settings=settings, entry=entry))
        await swarm.tell(A, {node_id: computes(entry.model_id, 10.0) for node_id in (D, M, N)})
        await swarm.tell(A, {node_id: computes(entry.model_id, 1e-4) for node_id in (B, C)})
        yield swarm


@dataclass
class Trusting:
    """Notes deeds in a book, and has every node but one checked as seldom as can be."""

    book: Trust
    checked: str

    def note(self, node_id: NodeId, deed: Deed, detail: str = "") -> None:
        self.book.note(node_id, deed, detail)

    def score(self, node_id: NodeId) -> float:
        return -1e9 if node_id == self.checked else 1e9


async def ask(swarm: Swarm, question: str, checked: str, temperature: float = 0.0) -> None:
    """And wait for the check of that node."""
    swarm[A].pipelines._checker.trust = Trusting(swarm[A].trust, checked)
    before = swarm[A].pipelines.statistics()
    prompt = Prompt(messages=[{"role": "user", "content": question}])
    with trio.fail_after(PATIENCE_S):
        async with swarm[A].pipelines.generate(
            prompt, swarm.entry, Sampling(temperature=temperature, seed=5, max_tokens=24)
        ) as generation:
            assert [piece async for piece in generation]
            assert [stage.node_id for stage in generation.route] == [A, B, C]
        while True:
            counts = swarm[A].pipelines.statistics()
            if counts.checked + counts.checks_dropped > before.checked + before.checks_dropped:
                return
            await trio.sleep(0.05)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_honest_workers_are_right_to_the_bit(
    temperature: float, tmp_path: Path, entry: CatalogueEntry
) -> None:
    async with guide_swarm(tmp_path, entry, entry.path) as swarm:
        for question in QUESTIONS:
            await ask(swarm, question, B, temperature)
            await ask(swarm, question + "?", C, temperature)
        for node_id in (B, C):
            explained = swarm[A].trust.explain(node_id)
            assert explained.counts == {"served": 6, "checked": 3}
            details = {entry.detail for entry in explained.recent if entry.deed is Deed.CHECKED}
            assert details == {"equal bits"}
        await swarm.quiet()


async def test_coarser_weights_of_the_same_model_are_wrong(tmp_path: Path, entry: CatalogueEntry) -> None:
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
    coarse = tmp_path / "coarse.gguf"
    given, made = str(GUIDE_PATH).encode(), str(coarse).encode()
    assert llama_cpp.llama_model_quantize(given, made, ctypes.byref(options)) == 0
    async with guide_swarm(tmp_path, entry, coarse) as swarm:
        await ask(swarm, QUESTIONS[0], B)
        assert swarm[A].trust.count(B, Deed.WRONG_RESULT) == 1
        assert swarm[A].trust.score(C) >= NEUTRAL
